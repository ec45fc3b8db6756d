"""Which processes are alive, decided by their signs of life."""

import pytest

from keras_towers.jobs.rendezvous import liveness as liveness_lib
from keras_towers.jobs.rendezvous.liveness import (
    ANSWERED,
    Liveness,
    TaskState,
)

LIMIT_S = 10


@pytest.fixture
def observe(monkeypatch):
    """The states of a process after refreshes at intervals of 6 s."""

    def observe(*signs, **options):
        current, now, states = {}, 100.0, []
        monkeypatch.setattr(liveness_lib.time, "monotonic", lambda: now)
        liveness = Liveness([0], lambda ranks: current, LIMIT_S, **options)
        for sign in signs:
            now += 6
            current = {} if sign is None else {0: sign}
            liveness.refresh()
            states.append(liveness.state(0))
        return states

    return observe


@pytest.mark.parametrize(
    ("signs", "states"),
    [
        # A heartbeat that goes on.
        ([1, 2, 3], [TaskState.ALIVE] * 3),
        # One that stops, and begins again.
        (
            [1, 1, 1, 2],
            [
                TaskState.ALIVE,
                TaskState.SUSPECTED,
                TaskState.LOST,
                TaskState.ALIVE,
            ],
        ),
        # No sign at all.
        ([None, None], [TaskState.SUSPECTED, TaskState.LOST]),
        # An answer is a new sign each time.
        (
            [ANSWERED, ANSWERED, None],
            [TaskState.ALIVE, TaskState.ALIVE, TaskState.SUSPECTED],
        ),
        # A process that has ended is gone, however long it was silent.
        (
            [1, TaskState.ENDED, TaskState.ENDED],
            [TaskState.ALIVE] + [TaskState.ENDED] * 2,
        ),
    ],
)
def test_state_follows_the_signs(observe, signs, states):
    assert observe(*signs) == states


def test_a_process_that_may_restart_has_until_the_limit(observe):
    ended = [TaskState.ENDED] * 2
    assert observe(1, *ended, may_restart=True) == [
        TaskState.ALIVE,
        TaskState.SUSPECTED,
        TaskState.ENDED,
    ]
    assert observe(*ended, ANSWERED, may_restart=True)[-1] == TaskState.ALIVE


def test_silence_is_counted_by_a_clock():
    """However long this process itself was stopped between two of its beats."""
    signs, beats = dict.fromkeys(range(4)), 0
    liveness = Liveness(signs, lambda _: signs, 3, clock=lambda: beats)
    for beats in range(1, 5):
        assert liveness.gone() == {}
        signs[1] = signs[2] = beats
        liveness.refresh()
    lost = dict.fromkeys((0, 3), TaskState.LOST)
    assert liveness.gone() == lost
    # It comes back, and another one ends.
    beats, signs[0], signs[1] = 5, 5, TaskState.ENDED
    liveness.refresh()
    assert liveness.gone() == {1: TaskState.ENDED, 3: TaskState.LOST}
    beats = 8
    liveness.refresh()
    assert liveness.gone() == {
        1: TaskState.ENDED,
        2: TaskState.LOST,
        3: TaskState.LOST,
    }
