"""Which processes are alive, decided by their signs of life."""

import pytest

from keras_towers.rendezvous import liveness as liveness_lib
from keras_towers.rendezvous.liveness import ANSWERED, Liveness, State

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
        ([1, 2, 3], [State.ALIVE] * 3),
        # One that stops, and begins again.
        ([1, 1, 1, 2], [State.ALIVE, State.SUSPECTED, State.LOST, State.ALIVE]),
        # No sign at all.
        ([None, None], [State.SUSPECTED, State.LOST]),
        # An answer is a new sign each time.
        (
            [ANSWERED, ANSWERED, None],
            [State.ALIVE, State.ALIVE, State.SUSPECTED],
        ),
        # A process that has ended is gone, however long it was silent.
        ([1, State.ENDED, State.ENDED], [State.ALIVE] + [State.ENDED] * 2),
    ],
)
def test_state_follows_the_signs(observe, signs, states):
    assert observe(*signs) == states


def test_a_process_that_may_restart_has_until_the_limit(observe):
    ended = [State.ENDED] * 2
    assert observe(1, *ended, may_restart=True) == [
        State.ALIVE,
        State.SUSPECTED,
        State.ENDED,
    ]
    assert observe(*ended, ANSWERED, may_restart=True)[-1] == State.ALIVE
