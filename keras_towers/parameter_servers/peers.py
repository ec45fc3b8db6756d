"""Values that workers tell one another, by way of parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras_towers import settings
from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.meeting.liveness import waiting
from keras_towers.meeting.store import wait
from keras_towers.parameter_servers import introduction
from keras_towers.parameter_servers.connection import Connection
from keras_towers.transport import plain


class ServerPeers:
    """The workers of a job as ``Peers``: of values only, not of tensors."""

    name = "TensorFlow's parameter servers"

    def __init__(
        self, connection: Connection, prefix: str, stall_shutdown_s: float
    ):
        self.connection: Connection = connection
        cluster = connection.cluster
        self.rank: int = cluster.rank
        self.size: int = cluster.size
        self.local_rank: int = cluster.local_rank
        self.local_size: int = cluster.local_size
        self.prefix = prefix
        self.stall_shutdown_s = stall_shutdown_s
        self._number = 0
        self._look: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def looking(self, look: Callable[[], None]) -> Iterator[None]:
        """Call something every now and then while this worker waits."""
        before, self._look = self._look, look
        try:
            yield
        finally:
            self._look = before

    def gather_objects(self, value: Any) -> list[Any]:
        self._number += 1
        where = f"{self.prefix}/told/{self._number}"
        store = self.connection.store
        self._refuse_second_chief(f"{where}-0")
        store.put(f"{where}-{self.rank}", plain.encode(value).decode())
        told = [
            self._await(f"{where}-{rank}", rank) for rank in range(self.size)
        ]
        return [plain.decode(text.encode()) for text in told]

    def _refuse_second_chief(self, key: str) -> None:
        """End a chief that another one has begun to tell the workers."""
        again = self.rank == 0 and self.connection.starts > 1
        if again and self.connection.store.get(key) is not None:
            raise TowerError(
                "the chief of this job has been started again by itself after "
                "it had begun to train, and what it knew of the training is "
                "lost: start all tasks of the job again, from a backup."
            )

    def _await(self, key: str, rank: int) -> str:
        who = introduction.task_name(self.connection.cluster, rank)
        me = introduction.task_name(self.connection.cluster, self.rank)
        look_s = min(settings.LOOK_S, self.stall_shutdown_s)
        for waited_s in waiting(self.stall_shutdown_s, 0):
            try:
                return str(wait(self.connection.store, key, look_s))
            except TimeoutError:
                self._look()
            if waited_s:
                tell(f"{me} waits for {who}")
        raise TowerError(
            f"{me} has waited {self.stall_shutdown_s:g} s for {who}. Every "
            "task that TF_CONFIG names has to run the script, and to call the "
            "same methods in the same order; stall_shutdown_s waits for longer."
        )
