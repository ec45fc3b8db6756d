"""Workers of parameter servers in one process, which is the server, too."""

import contextlib
import dataclasses
import socket
import threading

import pytest

from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous.network import is_reachable
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.parameter_servers import key_value_store, server_process
from keras_towers.parameter_servers.key_value_store import KeyValueStore
from keras_towers.parameter_servers.server_connection import DroppedResources

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


@dataclasses.dataclass
class Connected:
    """Stands for the connection of a worker; its server is this process.

    Attributes:
        cluster: the job.
        prefix: as of a connection.
        starts: likewise.
        finished: likewise.
    """

    cluster: Cluster
    prefix: str
    starts: int = 1
    finished: bool = True
    devices: tuple[str, ...] = (DEVICE,)

    def __post_init__(self):
        self.rank, self.size = self.cluster.rank, self.cluster.size
        self.dropped = DroppedResources()
        self.store = KeyValueStore(DEVICE)
        self.naming_lost_servers = contextlib.nullcontext


class Job:
    """A job whose workers are objects of a test.

    Args:
        name: of a test; no two jobs share one.
        workers: how many.
        monkeypatch: of the test.
    """

    def __init__(self, name, workers, monkeypatch):
        monkeypatch.setattr(key_value_store, "device_of", lambda server: DEVICE)
        monkeypatch.setattr(key_value_store, "_COMMON", name)
        self._name = name
        self._ports = [socket.create_server(("", 0)) for _ in range(workers)]
        for port in self._ports:
            threading.Thread(target=_take, args=(port,), daemon=True).start()
        addresses = tuple(
            f"127.0.0.1:{port.getsockname()[1]}" for port in self._ports
        )
        self._jobs = {"ps": ("127.0.0.1:1",), "worker": addresses}
        key_value_store.introduce(Cluster(self._jobs, "ps", 0), 0)
        # At these addresses connections are taken, and closed.
        self._connected = set()
        monkeypatch.setattr(server_process, "task_answers", self._answers)
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def connect(self, rank, starts=1):
        """Return the connection of a worker, which has introduced itself."""
        cluster = Cluster(self._jobs, "worker", rank)
        key_value_store.introduce(cluster, 0)
        self._connected.add(cluster.address)
        return Connected(cluster, f"{self._name}/", starts)

    def kill(self, rank):
        """Nobody listens at the address of a worker any more."""
        with contextlib.suppress(OSError):
            # Otherwise the thread would still wait at it.
            self._ports[rank].shutdown(socket.SHUT_RDWR)
        self._ports[rank].close()

    def hang(self, rank):
        """Connections are taken still, and nobody answers."""
        self._connected.discard(self._jobs["worker"][rank])

    def close(self):
        """Close all addresses."""
        self._ended.set()
        self._watch.join()
        for rank in range(len(self._ports)):
            self.kill(rank)

    def _answers(self, address):
        return address in self._connected and is_reachable(address)

    def _look(self):
        """Tell the workers who is missed, as a server does."""
        there = KeyValueStore(DEVICE)
        workers = server_process.WorkerLiveness(self._jobs["worker"], there)
        while not self._ended.wait(settings.BEAT_S):
            workers.refresh()
            server_process.publish_missing(
                there, f"{self._name}/", workers.missing()
            )


def _take(port):
    # The kernel keeps few that nobody takes, and then answers no more.
    with contextlib.suppress(OSError):
        while True:
            port.accept()[0].close()


@pytest.fixture
def job(request, monkeypatch):
    """Creates a job whose workers soon notice a lost one."""
    for name, seconds in (
        ("BEAT_S", 0.1),
        ("LOST_S", 1.5),
        ("LIVENESS_CHECK_S", 0.1),
    ):
        monkeypatch.setattr(settings, name, seconds)
    jobs = []

    def make(size):
        jobs.append(Job(f"{request.node.name}_{len(jobs)}", size, monkeypatch))
        return jobs[-1]

    yield make
    for made in jobs:
        made.close()
