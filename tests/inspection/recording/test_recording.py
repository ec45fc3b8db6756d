"""The times of Keras's loop, and of other ranks."""

import types

import numpy as np
import pytest

from keras_towers.inspection.recording import recording
from keras_towers.inspection.recording.phases import StepTimes, between_epochs

pytestmark = pytest.mark.core


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=0.0, traces=0)
    fake = types.SimpleNamespace(time=lambda: clock.now)
    monkeypatch.setattr(recording, "time", fake)
    return clock


def run(host, clock, calls, step=1.0, callbacks=0.5, traces=False):
    for _ in range(calls):
        host.begin_call(clock.traces)
        clock.traces += traces
        clock.now += step
        host.on_train_batch_end(0)
        clock.now += callbacks


def test_calls_that_trace_and_those_before_a_validation(clock):
    host = recording.LoopClock()
    host.restart(100)
    for epoch in range(2):
        run(host, clock, 1, step=9, traces=epoch == 0)
        run(host, clock, 3)
        host.end_callbacks()
        clock.now += 4
        host.on_epoch_end(epoch)
    begins, returned, ended, traced = calls = host.calls(clock.traces)
    assert traced.tolist() == [1] + [0] * 7
    np.testing.assert_array_equal(ended - returned, [0.5] * 8)
    assert between_epochs(StepTimes(*calls)).tolist() == [4]


def of_rank(machine, stamps, first_step=0):
    """The stamps of a rank, whose other times do not matter."""
    nothing = np.empty((0, 3)), np.empty((4, 0))
    return recording.RankRecording(0, machine, [], first_step, stamps, *nothing)


def test_clocks_are_set_by_the_sums_of_the_steps_of_all():
    # Of shape [steps, towers, points].
    step = [[1, 3, 7, 9], [1.5, 6, np.nan, np.nan]]
    mine = np.array([step] * 5) + 10 * np.arange(5).reshape(5, 1, 1)
    # Another machine's clock is 1000 s fast, and one step was disturbed.
    theirs = mine + 1000.25
    theirs[3] += 3
    ranks = [
        of_rank("a", mine),
        of_rank("b", theirs),
        # It has lost the first one.
        of_rank("a", theirs[1:], first_step=1),
    ]
    recording.align_clocks(ranks)
    one, other, third = (of.stamps for of in ranks)
    np.testing.assert_array_equal(one, mine[1:])
    np.testing.assert_array_equal(other[[0, 1, 3]], one[[0, 1, 3]])
    np.testing.assert_array_equal(third, theirs[1:])
    assert recording.join_stamps(ranks).shape == (4, 6, 4)
