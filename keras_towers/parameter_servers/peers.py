"""What the workers of a job tell one another by way of parameter servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.shared import Event, Table
from keras_towers.transport import plain

_FIRST_NOTICE_S = 5.0


class ServerPeers:
    """The workers of a job as a ``Transport``, of values only, not of tensors.

    What a worker has told stays on parameter server 0. A worker that has died
    and comes back, and runs the same program again, is told what the others
    were, without waiting for them.

    Args:
        connection: this worker's.
        prefix: what the names of shared objects begin with; another one for
            each instance in a process.
        stall_timeout_s: how long to wait for another worker.
    """

    name = "TensorFlow's parameter servers"

    def __init__(
        self, connection: Connection, prefix: str, stall_timeout_s: float
    ):
        self._connection = connection
        self._prefix = prefix
        self._stall_timeout_s = stall_timeout_s
        self._number = 0

    @property
    def rank(self) -> int:
        return self._connection.rank

    @property
    def size(self) -> int:
        return self._connection.size

    @property
    def local_rank(self) -> int:
        return self._connection.cluster.local_rank

    @property
    def local_size(self) -> int:
        return self._connection.cluster.local_size

    def mark(self, what: str) -> None:
        pass

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        _refuse()

    def all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        _refuse()

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        _refuse()

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        _refuse()

    def gather_objects(self, value: Any) -> list[Any]:
        self._number += 1
        where = f"{self._prefix}/told/{self._number}"
        server = self._connection.devices[0]
        table = Table(where, server, self.size)
        with self._connection.naming_lost_servers():
            table.insert(self.rank, plain.encode(value).decode())
            Event(f"{where}/{self.rank}", server).set()
            for rank in range(self.size):
                self._await(Event(f"{where}/{rank}", server), rank)
            told = table.items()
        return [plain.decode(told[rank].encode()) for rank in range(self.size)]

    def _await(self, event: Event, rank: int) -> None:
        notice_s = _FIRST_NOTICE_S
        begun = time.monotonic()
        while True:
            waited_s = time.monotonic() - begun
            left_s = self._stall_timeout_s - waited_s
            try:
                return event.wait(max(0.0, min(notice_s, left_s)))
            except TimeoutError:
                who = worker_name(self._connection, rank)
                if left_s <= notice_s:
                    raise TowerError(
                        f"{worker_name(self._connection, self.rank)} has "
                        f"waited {self._stall_timeout_s:g} s for {who}. Every "
                        "task that TF_CONFIG names has to run the script, and "
                        "to call the same methods in the same order; "
                        "stall_timeout waits for longer."
                    ) from None
                tell(
                    f"{worker_name(self._connection, self.rank)} waits for "
                    f"{who}"
                )
                notice_s *= 4


def worker_name(connection: Connection, rank: int) -> str:
    """What a worker is called in messages, such as ``"worker 1"``."""
    role, index = connection.cluster.tasks[rank]
    return f"{role} {index}"


def _refuse() -> NoReturn:
    raise TowerError(
        "workers that are connected by parameter servers cannot exchange "
        "tensors within a step: use HorovodStrategy or "
        "MultiWorkerTowerStrategy for that."
    )
