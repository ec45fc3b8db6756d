"""Workers that leave, stop, fail or die, as seen by other workers."""

import functools
import threading
import time
from concurrent.futures import Future

import pytest

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.parameter_servers.server_connection import ServerPeers
from keras_towers.parameter_servers.workers import FitEnded, Workers
from tests.kit.leaving import Boom

pytestmark = pytest.mark.alternate


def of(job, *ranks, stall_timeout_s=3, fit=1, spare=0):
    """Create the ``Workers`` of some ranks of a job."""
    found = []
    for rank in ranks:
        connection = job.connect(rank)
        peers = ServerPeers(connection, connection.prefix, stall_timeout_s)
        found.append(Workers(peers, fit, spare))
    return found


def soon(function, *args):
    """Run a function in a thread."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def ends_with(future, message=None):
    """Assert that a thread ends, with an error if a message is given."""
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


def test_the_chief_waits_only_for_workers_that_go_on(job, caplog):
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
    # At once, and not only when nobody waits for it any more.
    assert (
        " has failed (Boom: full disk): if worker 0 needs this worker, it "
        in told
    )
    assert "worker 2 has failed (Boom: full disk): fit ends without it" in told
    assert "worker 4 has given no sign of life for " in told
    assert "worker 5 can no longer be reached: fit ends" in told
    assert "worker 1 has" not in told and "worker 3 has" not in told
    # Each of them is reported once.
    assert sorted(lost) == [2, 4, 5]


def test_the_chief_does_not_wait_for_late_workers_after_the_last_update(
    job, caplog
):
    caplog.set_level("INFO", "keras_towers")
    chief, slow = of(job(2), 0, 1, stall_timeout_s=60)
    ended = soon(chief.wait_for_others, lambda: True)
    meanwhile(2, slow.beat)
    ends_with(ended)
    assert "worker 1 does not answer: fit ends" in caplog.text


def test_a_worker_that_recovers_may_be_lost_again(job):
    chief, stops = of(job(2), 0, 1, stall_timeout_s=1)
    lost = []
    losing = chief.loss_poller(lost.append)
    meanwhile(1.5, losing)
    assert lost == [1]
    stops.beat()
    meanwhile(1.5, losing)
    assert lost == [1, 1]


@pytest.mark.parametrize(
    "epoch, end",
    [
        ({}, {"steps": 12}),
        ({"begun": 3}, {"epoch_begun": 3}),
        ({"ended": 3}, {"epoch": 3}),
    ],
)
def test_the_wait_for_a_chief_that_stops_is_limited(job, epoch, end):
    chief, worker = of(job(2), 0, 1)
    silent = "worker 1 waits for the chief, which has given no sign"
    wait = functools.partial(worker.wait_for_chief, **epoch)
    ends_with(soon(wait), silent)
    # The wait for a chief that goes on has no limit.
    chief.publish(epoch=2, epoch_begun=2)
    ended = soon(wait)
    meanwhile(4, chief.beat)
    assert not ended.done()
    chief.publish(**end)
    ends_with(ended)


def test_the_chief_begins_an_epoch_after_the_others(job):
    chief, leaves, begins, stops = of(job(4), *range(4), stall_timeout_s=2)
    leaves.publish(left=True)
    stops.beat()
    ended = soon(chief.wait_until_begun, 3)
    meanwhile(1, begins.beat)
    assert not ended.done()
    begins.publish(epoch_begun=3)
    silent = "worker 0 waits for worker 3, which has given no sign of life"
    ends_with(ended, silent)
    ended = soon(chief.wait_until_begun, 3)
    stops.publish(epoch_begun=3)
    ends_with(ended)


def test_workers_end_if_the_chief_fails_or_dies(job):
    chief, worker = of(job(2), 0, 1, stall_timeout_s=60)
    ended = soon(worker.wait_for_chief)
    chief.fail(Boom("full disk"))
    ends_with(ended, "fit has failed on the chief, and so on this worker: Boom")
    it = job(2)
    _, worker = of(it, 0, 1, stall_timeout_s=60)
    it.kill(0)
    ends_with(soon(worker.wait_for_chief), "the chief can no longer be reached")


def test_workers_wait_for_a_chief_that_has_not_started(job):
    it = job(2)
    (worker,) = of(it, 1, stall_timeout_s=60)
    it.kill(0)
    meanwhile(1.5, worker.poller())


def test_a_restarted_worker_learns_that_the_fit_has_ended(job):
    it = job(2)
    worker, chief = of(it, 1, 0)
    assert not worker.publish_begun()
    (again,) = of(it, 1)
    assert again.publish_begun()
    look = again.poller(in_step=True)
    look()
    chief.publish(steps=12)
    with pytest.raises(FitEnded):
        look()
    # Waits outside of steps go on.
    again.poller()()
    assert again.status(0).steps == 12


def test_lost_workers_end_a_fit_unless_they_can_be_spared(job, caplog):
    caplog.set_level("INFO", "keras_towers")
    it = job(4)
    chief, worker, has_left, _ = of(it, *range(4), stall_timeout_s=60)
    (goes_on,) = of(it, 1, stall_timeout_s=60, spare=1)
    has_left.publish(left=True)
    it.hang(2)
    looks = [one.poller() for one in (chief, worker, goes_on)]
    until_told(caplog, "worker 2 at 127.0.0.1", *looks)
    # A process that has ended may be restarted; a hanging one is lost.
    it.kill(3)
    said = "has ended: if worker 0 needs this worker"
    until_told(caplog, said, *looks)
    it.hang(1)
    meanwhile(1, looks[2])
    said = r"worker 0 must end: worker 1 at \S+ is lost: it gives no sign"
    with pytest.raises(TowerError, match=said):
        meanwhile(30, looks[0])
    # With one worker to spare it goes on.
    (spares,) = of(it, 0, stall_timeout_s=60, spare=1)
    spares.poller()()
    # A fit needs all workers to begin.
    (goes_on,) = of(it, 0, fit=2, spare=1)
    with pytest.raises(TowerError, match="worker 2 at [^ ]+ is lost"):
        goes_on.poller(needs_all=True)()


def test_an_error_that_a_script_survives_ends_the_fit_on_all(job, monkeypatch):
    """Who cannot come back is not waited for."""
    it = job(3)
    chief, survives, third = of(it, *range(3), stall_timeout_s=60)
    (spares,) = of(it, 0, stall_timeout_s=60, spare=1)
    monkeypatch.setattr(settings, "LOST_S", 60)
    survives.fail(KeyboardInterrupt("by hand"))
    for one in (chief, third):
        one.poller()()
    # It begins another fit.
    survives.go_on()
    said = "fit has ended on worker {}, because it failed on worker 1: "
    for rank, one in ((0, chief), (2, third)):
        with pytest.raises(TowerError, match=said.format(rank) + "Keyb.*: by"):
            one.poller()()
    spares.poller()()
    # It does nothing that others notice.
    monkeypatch.setattr(settings, "LOST_S", 0.1)
    chief, survives = of(job(2), 0, 1, stall_timeout_s=60)
    survives.fail(Boom("full disk"))
    with pytest.raises(TowerError, match="failed on worker 1: Boom: full disk"):
        meanwhile(30, chief.poller())


def test_workers_that_share_batches_end_epochs_after_the_same_step(job):
    chief, other = of(job(2), 0, 1)
    look = chief.poller(in_step=True)
    chief.steps_done = other.steps_done = 5
    other.publish(epoch=0, epoch_steps=5)
    # The chief waits for the last weights of the epoch, or of the next.
    look()
    chief.publish(epoch=0, epoch_steps=5)
    chief.steps_done = 10
    look()
    other.publish(epoch=1, epoch_steps=9)
    said = "worker 1 has ended epoch 2 after 9 steps .* worker 0 has made 10"
    with pytest.raises(TowerError, match=said):
        look()
    chief.publish(epoch=1, epoch_steps=10)
    with pytest.raises(TowerError, match="after 10 steps"):
        other.check_same_data()
    # One that stops in the middle of an epoch does so on purpose.
    chief.publish(epoch=1, epoch_steps=None)
    other.check_same_data()
