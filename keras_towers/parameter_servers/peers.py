"""Values that workers tell one another, by way of parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras_towers import settings
from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.store import ServerStore, task_name
from keras_towers.rendezvous.liveness import waiting
from keras_towers.rendezvous.store import Store, wait
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
        # All go by way of the chief: if each worker read the values of all, the
        # server would send N times N.
        self._number += 1
        where = f"{self.prefix}/told/{self._number}"
        store = self.connection.store
        self._refuse_second_chief(f"{where}-0")
        mine = plain.encode(value).decode()
        store.put(f"{where}-{self.rank}", mine)
        if self.rank == 0:
            told = self._await(_Everyone(store, self.size), where)
            # As a rule most are equal.
            texts = list(dict.fromkeys(told))
            numbers = [texts.index(text) for text in told]
            store.put(where, [texts, numbers])
        else:
            texts, numbers = self._await(store, where)
            told = [texts[number] for number in numbers]
        # Another one than before, of a worker that has come back.
        told[self.rank] = mine
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

    def _await(self, store: Store, key: str) -> Any:
        cluster = self.connection.cluster
        me = task_name(cluster, self.rank)
        look_s = min(settings.LOOK_S, self.stall_shutdown_s)
        who = ""
        for waited_s in waiting(self.stall_shutdown_s, 0):
            try:
                return wait(store, key, look_s)
            except TimeoutError:
                self._look()
            come = self.connection.store.by_rank(key, range(self.size))
            missing = [r for r in range(self.size) if r not in come] or [0]
            who = ", ".join(
                task_name(cluster, rank) for rank in missing[: settings.NAMED]
            )
            if waited_s:
                tell(f"{me} waits for {who}")
        raise TowerError(
            f"{me} has waited {self.stall_shutdown_s:g} s for {who}. Every "
            "task that TF_CONFIG names has to run the script, and to call the "
            "same methods in the same order; stall_shutdown_s waits for longer."
        )


class _Everyone:
    """The values of all ranks as one value, which is there once all are."""

    def __init__(self, store: ServerStore, size: int):
        self._store, self._ranks = store, range(size)
        self.put = store.put

    def get(self, key: str) -> list[str] | None:
        found = self._store.by_rank(key, self._ranks)
        return [*found.values()] if len(found) == len(self._ranks) else None
