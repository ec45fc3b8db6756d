"""The work of a task of the role ``ps``, until training has ended.

It serves, and asks which workers answer: workers need not reach one another,
and N of them would ask N times N times. It tells all of them who is missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from keras_towers import settings
from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.parameter_servers.remote import join
from keras_towers.parameter_servers.server_store import (
    ServerStore,
    goodbyes,
    has_come,
    introduce,
    prefix,
    store_on,
    task_name,
)
from keras_towers.rendezvous.addresses import answers, refuses
from keras_towers.rendezvous.environments.tf_config import Cluster
from keras_towers.rendezvous.liveness import Liveness
from keras_towers.rendezvous.store import tell_connected
from keras_towers.system import end_in_time, keep_freed

# Silence takes time: these are asked at once.
_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Missed:
    """A worker that has come, and does not answer."""

    silent_s: float
    has_ended: bool
    """Whether its host is there, without its process."""

    @property
    def is_gone(self) -> bool:
        """Whether the worker has not answered for long."""
        return self.silent_s > settings.LOST_S

    @property
    def is_lost(self) -> bool:
        """Whether the worker's host is gone as well, or its process hangs."""
        return self.is_gone and not self.has_ended


class Roll(Liveness):
    """The workers of a job, as a parameter server sees them."""

    def __init__(self, workers: Sequence[str], store: ServerStore):
        self._addresses = workers
        self._store = store
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._answered: dict[int, float | None] = {}
        self._refused: dict[int, bool] = {}
        super().__init__(range(len(workers)), self._ask_all)

    def _ask_all(self, ranks: Sequence[int]) -> dict[int, float | bool | None]:
        """Ask workers, several at once, for their last signs of life."""
        list(self._pool.map(self._ask, ranks))
        return {
            # A worker may be gone before it was asked.
            rank: self._answered[rank]
            or self.signs[rank]
            or has_come(self._store, rank)
            or None
            for rank in ranks
        }

    def _ask(self, rank: int) -> None:
        address = self._addresses[rank]
        there = answers(address)
        self._answered[rank] = time.monotonic() if there else None
        self._refused[rank] = not there and refuses(address)

    def silent_s(self, rank: int) -> float:
        """Seconds since the last sign of a worker; 0 if it answered at last."""
        return 0.0 if self._answered.get(rank) else super().silent_s(rank)

    def missed(self) -> dict[int, Missed]:
        """The workers that have come, but did not answer at last."""
        return {
            rank: Missed(self.silent_s(rank), self._refused[rank])
            for rank, sign in self.signs.items()
            if sign and not self._answered[rank]
        }


def tell_of(store: ServerStore, prefix: str, missed: dict[int, Missed]) -> None:
    """Tell all workers which of them do not answer."""
    told = {rank: dataclasses.astuple(one) for rank, one in missed.items()}
    store.put(_key(prefix), told)


def missed(store: ServerStore, prefix: str) -> dict[int, Missed]:
    """The workers that do not answer, as a server has told."""
    told = store.get(_key(prefix)) or {}
    return {int(rank): Missed(*one) for rank, one in told.items()}


def _key(prefix: str) -> str:
    return f"{prefix}missed"


def serve(cluster: Cluster) -> None:
    """Serve the workers of a job until all of them have ended."""
    # A worker that dies, or ends with an error, may come back: it has said no
    # goodbye, and is waited for. When the chief has ended well, only workers
    # that can be reached at their addresses are. A chief that dies has lost
    # what it knew of the training, which ends.
    #
    # The server listens at its own address of ``TF_CONFIG``, and is not
    # authenticated, as TensorFlow's servers are not: it belongs in a private
    # network. Models that this process has made before cannot be used any more.
    me = cluster.index
    # Variables are in this machine's memory. Too late where it has begun.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    keep_freed()
    try:
        join({"ps": {me: cluster.address}}, job="ps", index=me)
    except tf.errors.OpError as error:
        raise TowerError(
            f"TensorFlow cannot serve as {cluster}: {error.message}"
        ) from error
    tell_connected(cluster.number)
    introduce(cluster, me)
    workers = f"{cluster.size} worker{'s' * (cluster.size > 1)}"
    tell(f"{cluster} serves {workers}")
    lost = _farewells(cluster)
    names = [task_name(cluster, rank) for rank in lost]
    tell(
        f"ps {me} ends: "
        + ("the chief has ended" if lost else "all workers have ended")
        + (f", and {', '.join(names)} cannot be reached" if lost else "")
    )


def _farewells(cluster: Cluster) -> list[int]:
    """Wait until nobody needs the server any more."""
    store = store_on(cluster.index)
    missing = set(range(cluster.size))
    roll = Roll(cluster.workers, store)
    asked = -math.inf
    ended = failure = None
    while True:
        said = store.by_rank(goodbyes(cluster), sorted(missing))
        if 0 in said:
            ended, failure = time.monotonic(), said[0]
        missing -= said.keys()
        now = time.monotonic()
        if now - asked > settings.BEAT_S:
            asked = now
            roll.look()
            if cluster.index == 0:
                tell_of(store, prefix(cluster), roll.missed())
        if ended is None:
            # It may not have been started yet.
            if roll.signs[0] and roll.silent_s(0) > settings.CHIEF_LOST_S:
                raise _ending(
                    f"{cluster} ends: the chief cannot be reached any more at "
                    f"{cluster.workers[0]}. Start all tasks of the job again, "
                    "from a backup."
                )
        elif _is_over(roll, missing, ended, bool(failure)):
            break
        time.sleep(settings.SERVER_LOOK_S)
    if failure:
        raise _ending(f"{cluster} ends: the chief has failed: {failure}")
    return sorted(missing)


def _is_over(
    roll: Roll, missing: Iterable[int], ended: float, failed: bool
) -> bool:
    """Whether workers that have said no goodbye no longer need the server."""
    waited_s = time.monotonic() - ended
    silent_s = [roll.silent_s(rank) for rank in missing]
    if failed:
        # To hear of it.
        over = all(each > settings.SERVERS_S for each in silent_s)
        return over or waited_s > settings.CHIEF_LOST_S
    return all(min(waited_s, each) > settings.LOST_S for each in silent_s)


def _ending(text: str) -> TowerError:
    end_in_time()
    return TowerError(text)
