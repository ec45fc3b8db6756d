"""What the store of a job is asked, as ranks become more."""

import collections
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_towers import settings
from keras_towers.rendezvous import (
    helper_process,
    launchers,
    meet,
    store,
    watch,
)
from keras_towers.rendezvous.store_server import Handler
from tests.launching.jobs import variables, wait_until


class Here(helper_process.HelperProcess):
    """What is beside each rank, in this process."""

    def __init__(self):
        self.helper = helper_process.Helper()

    def serve(self, endpoint, size):
        limits = settings.BEAT_S, settings.LOST_S
        at = dataclasses.astuple(endpoint)
        port, secret = self.helper.serve(at, size, *limits)
        return dataclasses.replace(endpoint, port=port, secret=secret)

    def beat(self, endpoint, rank):
        at = dataclasses.astuple(endpoint)
        self.helper.beat(at, rank, settings.BEAT_S)

    def stop(self):
        self.helper.end()


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the store has been asked so far, by method and key."""
    found = collections.Counter()

    def note(handler, *args):
        key = handler.path.rpartition("/")[2]
        found[f"{handler.command} {key.rpartition('-')[0] or key}"] += 1

    monkeypatch.setattr(Handler, "log_message", note)
    monkeypatch.setattr(watch, "rank0_name", "")
    monkeypatch.setenv(settings.RENDEZVOUS_FOLDER, str(tmp_path))
    return found


def met(size, monkeypatch):
    """Let ranks meet; what is beside them, and a client of their store."""
    here = Here()
    monkeypatch.setattr(meet, "_helper", lambda: here)

    def join(rank):
        it = launchers.Torchrun(
            variables(
                f"RANK={rank} WORLD_SIZE={size} LOCAL_WORLD_SIZE={size} "
                f"MASTER_ADDR=localhost TORCHELASTIC_RUN_ID={size}"
            )
        )
        meeting = meet.Meeting(it)
        return meeting.with_rank_0() if rank else meeting.of_rank_0()

    with ThreadPoolExecutor(size) as pool:
        # Rank 0 is the last one.
        told = list(pool.map(join, reversed(range(size))))
    ranks = [int(environment["HOROVOD_RANK"]) for environment in told]
    assert ranks == list(reversed(range(size)))
    for name in (settings.STORE, settings.SECRET, store.HOROVODS_ADDRESS):
        monkeypatch.setenv(name, told[0][name])
    return here, store.from_environment()


def test_questions_grow_no_faster_than_ranks(asked, monkeypatch):
    size = 16
    for name in ("BEAT_S", "HOLD_S"):
        monkeypatch.setattr(settings, name, 60)
    here, client = met(size, monkeypatch)
    # A sign of life, too; nobody asks again while it waits for others.
    assert sum(asked.values()) <= 3 * size + 2, asked
    asked.clear()
    # However many ranks it waits for, a rank asks once at each beat.
    one = watch.StallWatch(0, size, client, 0.6)
    watch.mark("step 1")
    one.start()
    assert wait_until(lambda: asked["POST progress"] > 12)
    one.stop()
    one.join(60)
    here.stop()
    assert asked.keys() <= {"POST progress", "PUT heartbeat"}, asked
