"""Signals that are handled inside a block only."""

import signal
import threading

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
    before, found = handlers(), []

    def run():
        with signals.handled(BOTH, print):
            found.extend(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == before
