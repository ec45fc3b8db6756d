"""Workers that leave, stop, fail or die, as the others see them."""

import threading
import time

import pytest

from keras_towers.errors import TowerError
from keras_towers.fit.served.workers import FitEnded, Workers
from tests.kit.leaving import Boom


def of(job, rank, stall_timeout_s=1.5):
    connection = job.connect(rank)
    name = f"{connection.prefix}fit_1"
    return Workers(connection, name, stall_timeout_s)


def soon(function):
    """Run something in a thread; return what it has raised, once it ends."""
    raised = []

    def run():
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended(limit_s=20):
        thread.join(limit_s)
        assert not thread.is_alive(), "still waits"
        return raised[0] if raised else None

    return ended


def beating(workers, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        workers.beat()
        time.sleep(0.1)


def waiting_chief(chief, is_over=lambda: False):
    return soon(lambda: chief.wait_for_others(is_over))


def test_the_chief_waits_for_those_who_go_on_and_for_no_others(job, caplog):
    caplog.set_level("INFO", "keras_towers")
    it = job(5)
    chief, leaves, fails, slow, stops = (of(it, rank) for rank in range(5))
    stops.beat()
    fails.fail(Boom("full disk"))
    begun = time.monotonic()
    ended = waiting_chief(chief)
    leaves.leave()
    beating(slow, 3)
    assert time.monotonic() - begun >= 3
    slow.leave()
    assert ended() is None
    told = " ".join(caplog.messages)
    assert "worker 2 has failed: fit ends without it" in told
    assert "worker 4 has given no sign of life for " in told
    assert "worker 1 has" not in told and "worker 3 has" not in told


def test_the_chief_does_not_wait_for_the_dead_or_when_all_is_over(job, caplog):
    caplog.set_level("INFO", "keras_towers")
    it = job(2)
    it.kill(1)
    chief = of(it, 0, stall_timeout_s=60)
    assert waiting_chief(chief)() is None
    assert "worker 1 cannot be reached any more: fit ends" in caplog.text
    it = job(2)
    slow = of(it, 1, stall_timeout_s=60)
    ended = waiting_chief(of(it, 0, 60), is_over=lambda: True)
    beating(slow, 2)
    assert ended() is None
    assert "worker 1 does not answer: fit ends" in caplog.text


@pytest.mark.parametrize("what", ["end", "epoch"])
def test_a_chief_that_stops_is_waited_for_no_longer_than_was_said(job, what):
    it = job(2)
    chief, worker = of(it, 0), of(it, 1)
    wait = worker.wait_for_end
    if what == "epoch":
        wait = lambda: worker.wait_for_epoch(3)  # noqa: E731
    ended = soon(wait)
    beating(chief, 2.5)
    error = ended()
    assert isinstance(error, TowerError)
    assert "worker 1 waits for the chief, which has given no sign" in str(error)
    # One that goes on is waited for.
    ended = soon(wait)
    beating(chief, 2.5)
    if what == "epoch":
        chief.end_epoch(3)
    else:
        chief.end(12)
    assert ended() is None


def test_a_chief_that_fails_or_dies_ends_the_others(job):
    it = job(2)
    chief, worker = of(it, 0, 60), of(it, 1, 60)
    ended = soon(worker.wait_for_end)
    chief.fail(Boom("full disk"))
    assert "the chief's fit has failed" in str(error := ended())
    assert "Boom: full disk" in str(error)
    it = job(2)
    chief, worker = of(it, 0, 60), of(it, 1, 60)
    it.kill(0)
    error = soon(worker.wait_for_end)()
    assert "the chief cannot be reached any more" in str(error)


def test_a_chief_that_was_not_started_yet_is_waited_for(job):
    it = job(2)
    worker = of(it, 1, 60)
    it.kill(0)
    look = worker.watching()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        look()
        time.sleep(0.1)


def test_a_worker_knows_that_it_comes_back_and_that_it_is_late(job):
    it = job(2)
    worker = of(it, 1)
    assert not worker.begin()
    again = of(it, 1)
    assert again.begin()
    look = again.watching(in_step=True)
    look()
    of(it, 0).end(12)
    with pytest.raises(FitEnded):
        look()
    # What is not part of a step goes on.
    again.watching()()
    assert again.batches() == 12


def test_those_that_are_lost_are_told_of_once(job):
    it = job(4)
    chief, goes_on, stops, dies = (of(it, rank, 1.0) for rank in range(4))
    it.kill(3)
    lost = []
    look = chief.losing(lost.append)
    until = time.monotonic() + 2.5
    stops.beat()
    while time.monotonic() < until:
        goes_on.beat()
        look()
        time.sleep(0.05)
    assert sorted(lost) == [2, 3]
