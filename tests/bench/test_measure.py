"""What one process measures."""

import pytest

from keras_towers.bench.measure import (
    differences,
    measure_training,
    steps_needed,
)
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.trainers import Times, Trainer


def test_differences_between_one_batch_and_the_next():
    assert differences([1.0, 3.0, 6.0]) == [2.0, 3.0]
    assert differences([1.0]) == []


def test_bursts_of_asynchronous_towers_are_a_rate_over_some_rounds():
    # Four towers take their batches at once, every two seconds.
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
        return Times([float(step) for step in range(steps)], starts, 0.5)

    return Trainer(train, lambda: [1.0])


@pytest.mark.parametrize("alone", [True, False])
def test_rank_is_timed_while_the_others_train(tmp_path, alone):
    Meeting(tmp_path, 1, 2).leave("warm")
    calls = []
    result = measure_training(
        counting(tmp_path, calls), Meeting(tmp_path, 0, 2), 7, alone=alone
    )
    assert result["step_ms"] == [1e3] * 7
    assert result["epoch_cost_s"] == 3
    assert calls[:3] == [(10, 1), (11, 1), (4, 5)]
    assert steps_needed(2, 7, 1) == 11
    # Until the other one is done too, where nothing keeps the two in step.
    assert calls[3:] == ([(4, 1)] * 2 if alone else [])


@pytest.mark.parametrize(("over", "steps"), [(1, 18), (12, 31)])
def test_one_process_warms_up_in_the_timed_run(tmp_path, over, steps):
    calls = []
    result = measure_training(
        counting(tmp_path, calls), Meeting(tmp_path, 0, 1), 7, over, alone=True
    )
    assert result["step_ms"] == [1e3] * 7
    assert calls == [(steps, 1), (4, 5)]
    assert steps_needed(1, 7, over) == steps
