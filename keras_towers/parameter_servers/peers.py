"""What the workers of a job tell one another by way of parameter servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from keras_towers import settings
from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.shared import Note
from keras_towers.transport import plain


class ServerPeers:
    """The workers of a job as a ``Transport``, of values only, not of tensors.

    What a worker has told stays on parameter server 0. A worker that has died
    and comes back, and runs the same program again, is told what the others
    were, without waiting for them.

    Args:
        connection: this worker's.
        prefix: what the names of shared objects begin with; another one for
            each instance in a process.
        stall_shutdown_s: how long to wait for another worker.
    """

    name = "TensorFlow's parameter servers"

    def __init__(
        self, connection: Connection, prefix: str, stall_shutdown_s: float
    ):
        self._connection = connection
        self._prefix = prefix
        self._stall_shutdown_s = stall_shutdown_s
        self._number = 0
        self._look: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def looking(self, look: Callable[[], None]) -> Iterator[None]:
        """Call something every now and then while this worker waits.

        Args:
            look: what it raises ends the wait.
        """
        before, self._look = self._look, look
        try:
            yield
        finally:
            self._look = before

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
        notes = [Note(f"{where}/{rank}", server) for rank in range(self.size)]
        with self._connection.naming_lost_servers():
            self._refuse_second_chief(notes[0])
            notes[self.rank].set(plain.encode(value).decode())
            told = [self._await(note, rank) for rank, note in enumerate(notes)]
        return [plain.decode(text.encode()) for text in told]

    def _refuse_second_chief(self, told: Note) -> None:
        """End a chief that another one has begun to tell the workers."""
        again = self.rank == 0 and self._connection.starts > 1
        if again and told.get() is not None:
            raise TowerError(
                "the chief of this job has been started again by itself after "
                "it had begun to train, and what it knew of the training is "
                "lost: start all tasks of the job again, from a backup."
            )

    def _await(self, note: Note, rank: int) -> str:
        notice_s = settings.NOTICE_S
        begun = time.monotonic()
        while True:
            waited_s = time.monotonic() - begun
            left_s = self._stall_shutdown_s - waited_s
            try:
                return note.wait(max(0.0, min(settings.LOOK_S, left_s)))
            except TimeoutError:
                self._look()
            who = worker_name(self._connection, rank)
            me = worker_name(self._connection, self.rank)
            if left_s <= settings.LOOK_S:
                raise TowerError(
                    f"{me} has waited {self._stall_shutdown_s:g} s for {who}. "
                    "Every task that TF_CONFIG names has to run the script, "
                    "and to call the same methods in the same order; "
                    "stall_shutdown_s waits for longer."
                )
            if waited_s + settings.LOOK_S >= notice_s:
                tell(f"{me} waits for {who}")
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
