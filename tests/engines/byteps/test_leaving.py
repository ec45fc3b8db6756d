"""A rank that leaves pushes zeros where others wait for it, without BytePS."""

import threading
import types

import pytest
import tensorflow as tf

from keras_towers.engines.byteps import byteps_transport
from keras_towers.engines.byteps.byteps_transport import BytePSTransport
from keras_towers.jobs.rendezvous.store_server import StoreServer

RANKS = 1000


class Store(StoreServer):
    """Counts what is read."""

    reads = 0

    def read(self, *args):
        self.reads += 1
        return super().read(*args)


@pytest.fixture
def store(monkeypatch):
    server = Store("127.0.0.1")
    monkeypatch.setattr(byteps_transport.store, "store_of_job", lambda: server)
    yield server
    server.stop()


def rank_of_job(number):
    rank = BytePSTransport.__new__(BytePSTransport)
    rank.engine = types.SimpleNamespace(rank=lambda: number, size=lambda: RANKS)
    rank._waiting, rank._left = set(), set()
    return rank


def test_it_reads_one_key_and_pushes_once(store, monkeypatch):
    begun = {"sum": (3, 2), "gather": (1, 1), "mine": (5, 4)}
    rounds = {
        name: byteps_transport._Rounds(4, tf.float32, *map(tf.Variable, both))
        for name, both in begun.items()
    }
    pushed, all_pushed = [], threading.Event()

    def push(rank, rounds, name):
        pushed.append(name)
        all_pushed.set()

    monkeypatch.setattr(BytePSTransport, "_push_zeros", push)
    monkeypatch.setattr(byteps_transport, "_rounds", rounds)
    leaving = rank_of_job(0)
    leaving.abort()
    mine = rounds.pop("mine")
    for number in range(1, 20):
        waiting = rank_of_job(number)
        waiting.abort()
        reads = store.reads
        waiting.abort()
        assert store.reads == reads
    rounds["mine"], reads = mine, store.reads
    for _ in range(2):
        leaving.leave()
    # Rank 0 waits in one of them, too, but may not have pushed.
    assert all_pushed.wait(20)
    assert (pushed, store.reads - reads) == (["sum/0"], 2)
