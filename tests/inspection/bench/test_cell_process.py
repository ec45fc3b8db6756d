"""What one process measures."""

import ctypes
import gc
import mmap
import types

import keras
import numpy as np
import pytest

from keras_towers.inspection.bench import cell_process
from keras_towers.inspection.bench.cell_process import differences
from keras_towers.inspection.bench.models import Workload
from keras_towers.inspection.bench.rows import Times, fit
from keras_towers.inspection.bench.runner import Setting
from keras_towers.jobs.rendezvous.file_store import FileStore

SETTING = Setting("cpu", 8, 7, 60)


def test_times_of_steps():
    assert differences([1.0, 3.0, 6.0], over=1) == [2.0, 3.0]
    assert differences([1.0], over=1) == []
    # Four asynchronous towers take their batches at once, every two seconds.
    times = [2.0 * step for step in range(10) for _ in range(4)]
    assert differences(times, over=12) == pytest.approx([0.5] * 28)


def test_peak_of_memory_is_counted_from_its_reset():
    # What is free goes back to the system now rather than meanwhile.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = cell_process.reset_peak_memory()
    with mmap.mmap(-1, 80 * 10**6) as memory:
        # The system gives memory only where it is written to.
        pages = range(0, len(memory), mmap.PAGESIZE)
        memory[:: mmap.PAGESIZE] = b"1" * len(pages)
    assert 70 < cell_process.peak_memory() - before < 200


def work(folder, size, model=None, batch=8):
    return Workload(model, folder, 0, size, [], batch, steps=3)


def counting(calls):
    """Train nothing; a second passes in every step."""

    def train(steps, waits):
        assert waits == (not calls)
        calls.append(steps)
        return Times(
            batches=[float(step) for step in range(steps)],
            losses=[2.0] * steps,
            first_step_s=0.25,
            state_bytes=12,
        )

    return train


def test_rank_is_timed_once_all_are_warm(tmp_path):
    FileStore(tmp_path).put("warm.1", True)
    calls = []
    result = cell_process.measure(
        counting(calls), work(tmp_path, 2), SETTING, 1
    )
    assert result == {
        "first_step_s": 0.25,
        "losses": [2.0] * 20,
        "state_bytes": 12,
        "step_ms": 1e3,
    }
    assert calls == [20, 11]
    # As what exchanges nothing trains on, until the other one is done too.
    more = []

    def train_on():
        more.append(4)
        if len(more) == 2:
            FileStore(tmp_path).put("done.1", True)

    cell_process.wait_for_all(work(tmp_path, 2), "done", train_on)
    assert more == [4, 4]


def test_a_window_of_several_steps_settles_for_longer(tmp_path):
    calls = []
    cell_process.measure(counting(calls), work(tmp_path, 1), SETTING, 12)
    assert calls == [20, 31]


def test_each_step_has_its_own_loss(tmp_path):
    """Keras gives the mean over the steps of the epoch so far."""
    x = np.ones((6, 1), "float32")
    y = np.array([[3.0], [3], [0], [0], [1], [1]])
    model = types.SimpleNamespace(data=lambda examples: (x, y))
    still = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    still.compile(keras.optimizers.SGD(0.0), "mae")
    still.set_weights([np.zeros((1, 1)), np.zeros(1)])
    train = fit(work(tmp_path, 1, model, batch=2), still)
    first, second = train(3, True), train(3, False)
    assert first.losses == pytest.approx([3.0, 0.0, 1.0])
    assert len(first.batches) == len(second.batches) == 3
    assert first.first_step_s > 0
    assert not second.losses
