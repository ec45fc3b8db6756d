"""Who is alive, decided by signs of life."""

import pytest

from keras_towers.rendezvous.liveness import ANSWERED, Liveness, State

LIMIT_S = 10


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def observe(*signs, **options):
    """The states of a process after looks at these signs, 6 s apart."""
    clock = Clock()
    current = {}
    liveness = Liveness(
        [0], lambda ranks: current, LIMIT_S, clock=clock, **options
    )
    states = []
    for sign in signs:
        clock.now += 6
        current = {} if sign is None else {0: sign}
        liveness.refresh()
        states.append(liveness.state(0))
    return states


@pytest.mark.parametrize(
    ("signs", "states"),
    [
        # A heartbeat that goes on.
        ([1, 2, 3], [State.ALIVE] * 3),
        # One that stops, and begins again.
        (
            [1, 1, 1, 2],
            [State.ALIVE, State.SUSPECTED, State.LOST, State.ALIVE],
        ),
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
def test_state_follows_the_signs(signs, states):
    assert observe(*signs) == states


def test_a_process_that_may_restart_has_until_the_limit():
    ended = [State.ENDED] * 2
    assert observe(1, *ended, may_restart=True) == [
        State.ALIVE,
        State.SUSPECTED,
        State.ENDED,
    ]
    assert observe(*ended, ANSWERED, may_restart=True)[-1] == State.ALIVE
