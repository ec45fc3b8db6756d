"""What one process measures."""

import ctypes
import gc
import mmap
import types

import keras
import numpy as np
import pytest

from keras_towers.bench import worker
from keras_towers.bench.models import Workload
from keras_towers.bench.rows import Times, Trainer, fit
from keras_towers.bench.runner import Setting
from keras_towers.bench.worker import Growth, differences
from keras_towers.rendezvous.store import FileStore


def test_times_of_steps():
    assert differences([1.0, 3.0, 6.0]) == [2.0, 3.0]
    assert differences([1.0]) == []
    # Four asynchronous towers take their batches at once, every two seconds.
    times = [2.0 * step for step in range(10) for _ in range(4)]
    assert differences(times, over=12) == pytest.approx([0.5] * 28)


SETTING = Setting("cpu", 8, 7, 60)


def taken(megabytes):
    """Memory beside the heap, whose size is what others leave of it."""
    memory = mmap.mmap(-1, megabytes * 10**6)
    # The system gives memory only where it is written to.
    pages = range(0, len(memory), mmap.PAGESIZE)
    memory[:: mmap.PAGESIZE] = b"1" * len(pages)
    return memory


def counting(folder, calls):
    """Train nothing; a second passes in every step, and three after each."""

    def train(steps, epochs, waits):
        assert waits == (not calls)
        calls.append((steps, epochs))
        if len(calls) == 5:
            FileStore(folder).put("done.1", True)
        starts = [epoch * (steps + 3.0) for epoch in range(epochs + 1)]
        batches = [float(step) for step in range(steps)]
        with taken(30):
            pass
        return Times(batches, starts, [2.0] * steps, 0.25)

    return Trainer(train)


def work(folder, size, model=None, batch=8):
    data = model or types.SimpleNamespace(data=lambda examples: ([1], [2]))
    return Workload(data, folder, 0, size, [], batch, steps=3)


@pytest.mark.parametrize("alone", [True, False])
def test_rank_is_timed_while_the_others_train(tmp_path, alone):
    FileStore(tmp_path).put("warm.1", True)
    calls, mine = [], work(tmp_path, 2)
    # What is free goes back to the system now rather than meanwhile.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    memory = Growth(mine)
    # What is there before it trains, such as the model.
    with taken(60):
        trainer = counting(tmp_path, calls)
        result = worker.measure(trainer, mine, memory, SETTING, 1, alone)
    assert result["step_ms"] == [1e3] * 7
    assert result["epoch_cost_s"] == 3
    assert calls[:3] == [(20, 1), (11, 1), (4, 5)]
    assert result["first_step_s"] == 0.25
    assert result["losses"] == [2.0] * 20
    assert result["memory_mb"] > 80
    # Until the other one is done too, where nothing keeps the two in step.
    assert calls[3:] == ([(4, 1)] * 2 if alone else [])


@pytest.mark.parametrize(("over", "steps"), [(1, 11), (12, 31)])
def test_one_process_is_timed_after_its_warm_up(tmp_path, over, steps):
    calls, mine = [], work(tmp_path, 1)
    trainer, memory = counting(tmp_path, calls), Growth(mine)
    result = worker.measure(trainer, mine, memory, SETTING, over, True)
    assert result["step_ms"] == [1e3] * 7
    assert calls == [(20, 1), (steps, 1), (4, 5)]
    assert worker.steps_needed(7, over) == max(20, steps)


def test_each_step_has_its_own_loss(tmp_path):
    """Keras gives the mean over the steps of the epoch so far."""
    x = np.ones((6, 1), "float32")
    y = np.array([[3.0], [3], [0], [0], [1], [1]])
    model = types.SimpleNamespace(data=lambda examples: (x, y))
    still = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    still.compile(keras.optimizers.SGD(0.0), "mae")
    still.set_weights([np.zeros((1, 1)), np.zeros(1)])
    trainer = fit(work(tmp_path, 1, model, batch=2), still)
    first, second = trainer.train(3, 2, True), trainer.train(3, 1, False)
    assert first.losses == pytest.approx([3.0, 0.0, 1.0])
    assert len(first.batches) == 6 and len(first.epochs) == 3
    assert first.first_step_s > 0
    assert not second.losses
