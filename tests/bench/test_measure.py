"""What one process measures."""

import pytest

from keras_towers.bench import measure
from keras_towers.bench.measure import differences, measure_training
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.memory import Growth
from keras_towers.bench.times import Times, step_losses
from keras_towers.bench.trainers import Trainer


def test_times_of_steps():
    assert differences([1.0, 3.0, 6.0]) == [2.0, 3.0]
    assert differences([1.0]) == []
    # Four asynchronous towers take their batches at once, every two seconds.
    times = [2.0 * step for step in range(10) for _ in range(4)]
    assert differences(times, over=12) == pytest.approx([0.5] * 28)


def test_ranks_meet_in_a_folder(tmp_path):
    first, second = (Meeting(tmp_path, rank, 2) for rank in (0, 1))
    first.leave("port", "1")
    assert not first.complete("port")
    assert second.exchange("port", "2") == ["1", "2"]
    assert first.complete("port")


def counting(folder, calls):
    """Train nothing; a second passes in every step, and three after each."""

    def train(steps, epochs):
        calls.append((steps, epochs))
        if len(calls) == 5:
            Meeting(folder, 1, 2).leave("done")
        starts = [epoch * (steps + 3.0) for epoch in range(epochs + 1)]
        batches = [float(step) for step in range(steps)]
        # The system gives memory only when it is written to.
        bytearray(b"1" * 30_000_000)
        return Times(batches, starts, 0.5, [2.0] * steps, 0.25)

    return Trainer(train, lambda: [1.0])


@pytest.mark.parametrize("alone", [True, False])
def test_rank_is_timed_while_the_others_train(tmp_path, alone):
    Meeting(tmp_path, 1, 2).leave("warm")
    calls = []
    memory = Growth()
    # What is there before it trains, such as the model.
    model = bytearray(b"1" * 60_000_000)
    trainer, meeting = counting(tmp_path, calls), Meeting(tmp_path, 0, 2)
    result = measure_training(trainer, meeting, memory, 7, alone=alone)
    assert result["step_ms"] == [1e3] * 7
    assert result["epoch_cost_s"] == 3
    assert calls[:3] == [(10, 1), (11, 1), (4, 5)]
    assert result["first_step_s"] == 0.25
    assert result["first_losses"] == [2.0] * 10
    assert result["memory_mb"] > 80
    del model
    # Until the other one is done too, where nothing keeps the two in step.
    assert calls[3:] == ([(4, 1)] * 2 if alone else [])


@pytest.mark.parametrize(("over", "steps"), [(1, 11), (12, 31)])
def test_one_process_is_timed_after_its_warm_up(tmp_path, over, steps):
    calls = []
    trainer, meeting = counting(tmp_path, calls), Meeting(tmp_path, 0, 1)
    result = measure_training(
        trainer, meeting, Growth(), 7, over, alone=True, first_steps=20
    )
    assert result["step_ms"] == [1e3] * 7
    assert calls == [(20, 1), (steps, 1), (4, 5)]
    assert measure.steps_needed(7, over, 20) == max(20, steps)


def test_loss_of_a_step_is_found_in_the_means_up_to_each():
    assert step_losses([4.0, 3.0, 2.5]) == [4.0, 2.0, 1.5]
    assert step_losses([]) == []
