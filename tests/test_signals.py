"""Signals that are handled inside a block only."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_towers import signals

BOTH = (signal.SIGUSR1, signal.SIGUSR2)


def handlers():
    return [signal.getsignal(number) for number in BOTH]


def test_handled_inside_and_as_before_behind():
    before, seen = handlers(), []
    with (
        pytest.raises(KeyError),
        signals.handled(BOTH, lambda number, _: seen.append(number)),
    ):
        for number in BOTH:
            signal.raise_signal(number)
        raise KeyError
    assert seen == list(BOTH)
    assert handlers() == before


def test_another_thread_changes_nothing():
    def inside():
        with signals.handled(BOTH, print):
            return handlers()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() == handlers()
