"""Workers that leave, stop, fail or die, as the others see them."""

import threading
import time
from concurrent.futures import Future

import pytest

from keras_towers.errors import TowerError
from keras_towers.parameter_servers.connection import ServerPeers
from keras_towers.parameter_servers.workers import FitEnded, Workers
from tests.kit.leaving import Boom


def of(job, *ranks, stall_shutdown_s=3, fit=1, spare=0):
    """The workers of some ranks of a job, each of which sees the others."""
    found = []
    for rank in ranks:
        connection = job.connect(rank)
        peers = ServerPeers(connection, connection.prefix, stall_shutdown_s)
        found.append(Workers(peers, fit, spare))
    return found


def soon(function, *args):
    """Run something in a thread."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def ends_with(future, message=None):
    """What it ends with, within some time."""
    error = future.exception(60)
    if message is None:
        assert error is None
    else:
        assert isinstance(error, TowerError)
        assert message in str(error)


def meanwhile(seconds, *functions):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for function in functions:
            function()
        time.sleep(0.05)


def until_told(caplog, text, *functions):
    until = time.monotonic() + 30
    while text not in caplog.text:
        assert time.monotonic() < until, caplog.text
        meanwhile(0.1, *functions)


def test_the_chief_waits_for_those_who_go_on_and_for_no_others(job, caplog):
    caplog.set_level("INFO", "keras_towers")
    it = job(6)
    chief, leaves, fails, slow, stops, dies = of(it, *range(6))
    stops.beat()
    fails.fail(Boom("full disk"))
    it.kill(5)
    lost = []
    losing = chief.loss_poller(lost.append)
    ended = soon(chief.wait_for_others, lambda: False)
    meanwhile(5, leaves.beat, fails.beat, slow.beat, losing)
    leaves.publish(left=True)
    meanwhile(0.5, slow.beat, losing)
    assert not ended.done()
    slow.publish(left=True)
    ends_with(ended)
    told = " ".join(caplog.messages)
    assert "worker 2 has failed (Boom: full disk): fit ends without it" in told
    assert "worker 4 has given no sign of life for " in told
    assert "worker 5 can no longer be reached: fit ends" in told
    assert "worker 1 has" not in told and "worker 3 has" not in told
    # Each of them is reported once.
    assert sorted(lost) == [2, 4, 5]


def test_the_chief_does_not_wait_when_all_is_over(job, caplog):
    caplog.set_level("INFO", "keras_towers")
    chief, slow = of(job(2), 0, 1, stall_shutdown_s=60)
    ended = soon(chief.wait_for_others, lambda: True)
    meanwhile(2, slow.beat)
    ends_with(ended)
    assert "worker 1 does not answer: fit ends" in caplog.text


@pytest.mark.parametrize(
    "epoch, end", [((), {"steps": 12}), ((3,), {"epoch": 3})]
)
def test_a_chief_that_stops_is_waited_for_no_longer_than_was_said(
    job, epoch, end
):
    chief, worker = of(job(2), 0, 1)
    silent = "worker 1 waits for the chief, which has given no sign"
    ends_with(soon(worker.wait_for_chief, *epoch), silent)
    # One that goes on is waited for.
    chief.publish(epoch=2)
    ended = soon(worker.wait_for_chief, *epoch)
    meanwhile(4, chief.beat)
    assert not ended.done()
    chief.publish(**end)
    ends_with(ended)


def test_a_chief_that_fails_or_dies_ends_the_others(job):
    chief, worker = of(job(2), 0, 1, stall_shutdown_s=60)
    ended = soon(worker.wait_for_chief)
    chief.fail(Boom("full disk"))
    ends_with(ended, "the chief's fit has failed, and with it this one: Boom")
    it = job(2)
    _, worker = of(it, 0, 1, stall_shutdown_s=60)
    it.kill(0)
    ends_with(soon(worker.wait_for_chief), "the chief can no longer be reached")


def test_a_chief_that_was_not_started_yet_is_waited_for(job):
    it = job(2)
    (worker,) = of(it, 1, stall_shutdown_s=60)
    it.kill(0)
    meanwhile(1.5, worker.poller())


def test_a_worker_knows_that_it_comes_back_and_that_it_is_late(job):
    it = job(2)
    worker, chief = of(it, 1, 0)
    assert not worker.begin()
    (again,) = of(it, 1)
    assert again.begin()
    look = again.poller(in_step=True)
    look()
    chief.publish(steps=12)
    with pytest.raises(FitEnded):
        look()
    # What is not part of a step goes on.
    again.poller()()
    assert again.status(0).steps == 12


def test_whoever_is_lost_is_waited_for_no_longer_than_need_be(job, caplog):
    caplog.set_level("INFO", "keras_towers")
    it = job(4)
    chief, worker, has_left, _ = of(it, *range(4), stall_shutdown_s=60)
    (goes_on,) = of(it, 1, stall_shutdown_s=60, spare=1)
    has_left.publish(left=True)
    it.hang(2)
    looks = [one.poller() for one in (chief, worker, goes_on)]
    until_told(caplog, "worker 2 at 127.0.0.1", *looks)
    # One whose process has ended may come back; a host or one that hangs not.
    it.kill(3)
    said = "has ended: if worker 0 needs it"
    until_told(caplog, said, *looks)
    it.hang(1)
    meanwhile(1, looks[2])
    said = r"worker 0 has to end: worker 1 at \S+ is lost: it gives no sign"
    with pytest.raises(TowerError, match=said):
        meanwhile(30, looks[0])
    # It could do without one.
    (spares,) = of(it, 0, stall_shutdown_s=60, spare=1)
    spares.poller()()
    # A fit begins with all of them.
    (goes_on,) = of(it, 0, fit=2, spare=1)
    with pytest.raises(TowerError, match="worker 2 at [^ ]+ is lost"):
        goes_on.poller(needs_all=True)()
