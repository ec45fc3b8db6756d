"""Which processes are alive, decided by their signs of life."""

import pytest

from keras_towers.jobs.rendezvous import liveness as liveness_lib
from keras_towers.jobs.rendezvous.liveness import (
    ANSWERED,
    Heartbeats,
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


def test_silence_is_counted_in_beats():
    """However long this process itself was stopped between two of them."""
    beats = Heartbeats(range(4), 3)
    for _ in range(3):
        assert beats.gone() == {}
        beats.beat()
        beats.sign(2)
        beats.sign(1, 7)
    lost = dict.fromkeys((0, 3), TaskState.LOST)
    assert beats.gone() == lost
    # It comes back; another one ends, and what it has sent before comes late.
    beats.sign(0)
    beats.sign(1, TaskState.ENDED)
    beats.sign(1, 8)
    # That of no rank of the job.
    beats.sign(9)
    for _ in range(2):
        beats.beat()
    assert beats.gone() == {1: TaskState.ENDED, 3: TaskState.LOST}
    beats.beat()
    assert beats.gone() == lost | {1: TaskState.ENDED, 2: TaskState.LOST}
