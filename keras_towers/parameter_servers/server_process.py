"""The process of a parameter server, until training has ended.

The server also polls the workers and publishes which of them do not answer.
Workers need no connection to one another, and N of them would poll N² times.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import announce
from keras_towers.foundation.system import keep_freed_memory, limit_teardown
from keras_towers.jobs.rendezvous.liveness import (
    ANSWERED,
    Liveness,
    TaskState,
    ask_each,
)
from keras_towers.jobs.rendezvous.network import (
    refuses_connections,
    task_answers,
)
from keras_towers.jobs.rendezvous.rank_environment import meeting_limit_s
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.parameter_servers import key_value_store
from keras_towers.parameter_servers.key_value_store import KeyValueStore
from keras_towers.parameter_servers.remote_runtime import join


class WorkerLiveness(Liveness):
    """The workers of a job, as a parameter server sees them."""

    def __init__(self, workers: Sequence[str], store: KeyValueStore):
        super().__init__(
            range(len(workers)),
            ask_each(self._ask),
            settings.LOST_S,
            may_restart=True,
        )
        self._addresses = workers
        self._store = store

    def _ask(self, rank: int) -> Hashable:
        address = self._addresses[rank]
        if task_answers(address):
            return ANSWERED
        return TaskState.ENDED if refuses_connections(address) else None

    def has_started(self, rank: int) -> bool:
        """Return whether a worker has started."""
        # A worker may have ended before it was polled.
        return self.signs[rank] is not None or key_value_store.has_started(
            self._store, rank
        )

    def missing(self) -> dict[int, TaskState]:
        """Return the workers that have started but do not answer."""
        return {
            rank: self.state(rank)
            for rank in self.signs
            if self.state(rank) != TaskState.ALIVE and self.has_started(rank)
        }


def publish_missing(
    store: KeyValueStore, prefix: str, states: dict[int, TaskState]
) -> None:
    """Publish to all workers which workers do not answer."""
    store.put(_key(prefix), states)


def missing_workers(store: KeyValueStore, prefix: str) -> dict[int, TaskState]:
    """Return the workers that do not answer, as published by a server."""
    states = store.get(_key(prefix)) or {}
    return {int(rank): TaskState(state) for rank, state in states.items()}


def _key(prefix: str) -> str:
    return f"{prefix}missing"


def serve(cluster: Cluster) -> None:
    """Serve the workers of a job until all of them have ended.

    A worker that dies or fails has not signed off and may be restarted, so the
    server waits for it. Once the chief has succeeded, the server waits only for
    workers that answer at their addresses. If the chief dies, the server ends:
    the state of the training is lost.

    The server listens at its address in ``TF_CONFIG``. Like all of TensorFlow's
    servers it is not authenticated: keep it in a private network. Models that
    this process has created before cannot be used afterwards.
    """
    me = cluster.index
    # Variables are kept in host memory. Fails if TensorFlow has started.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    keep_freed_memory()
    try:
        join({"ps": {me: cluster.address}}, job="ps", index=me)
    except tf.errors.OpError as error:
        raise TowerError(
            f"TensorFlow cannot serve as {cluster}: {error.message}"
        ) from error
    key_value_store.introduce(cluster, me)
    workers = "1 worker" if cluster.size == 1 else f"{cluster.size} workers"
    announce(f"{cluster} serves {workers}")
    lost = _wait_for_goodbyes(cluster)
    names = [key_value_store.task_name(cluster, rank) for rank in lost]
    announce(
        f"ps {me} ends: "
        + ("the chief has ended" if lost else "all workers have ended")
        + (f", and {', '.join(names)} cannot be reached" if lost else "")
    )


def _wait_for_goodbyes(cluster: Cluster) -> list[int]:
    """Wait until no worker needs the server; return those never signed off."""
    store = key_value_store.store_on(cluster.index)
    awaited = set(range(cluster.size))
    workers = WorkerLiveness(cluster.workers, store)
    start_limit_s = meeting_limit_s()
    asked = -math.inf
    ended = failure = None
    while True:
        said = store.by_rank(
            key_value_store.goodbyes_key(cluster), sorted(awaited)
        )
        if 0 in said:
            ended, failure = time.monotonic(), said[0]
        awaited -= said.keys()
        now = time.monotonic()
        if now - asked > settings.BEAT_S:
            asked = now
            workers.refresh()
            if cluster.index == 0:
                publish_missing(
                    store, key_value_store.prefix(cluster), workers.missing()
                )
        if ended is None:
            silent_s = workers.silent_s(0)
            if silent_s > settings.CHIEF_LOST_S and workers.has_started(0):
                raise _error(
                    f"{cluster} ends: the chief can no longer be reached at "
                    f"{cluster.workers[0]}. Start all tasks of the job again, "
                    "from a backup."
                )
            if silent_s > start_limit_s and not workers.has_started(0):
                raise _error(
                    f"{cluster} ends: the chief has not started at "
                    f"{cluster.workers[0]} for {start_limit_s} s. Start all "
                    "tasks that TF_CONFIG names, or set "
                    f"{settings.ENV_RENDEZVOUS_TIMEOUT} to more seconds."
                )
        elif _is_over(workers, awaited, ended, bool(failure)):
            break
        time.sleep(settings.SERVER_LOOK_S)
    if failure:
        raise _error(f"{cluster} ends: the chief has failed: {failure}")
    return sorted(awaited)


def _is_over(
    workers: Liveness, awaited: Iterable[int], ended: float, failed: bool
) -> bool:
    """Whether none of the workers that have not signed off can come back."""
    waited_s = time.monotonic() - ended
    silent_s = [workers.silent_s(rank) for rank in awaited]
    if failed:
        # Give them time to read about the failure.
        all_silent = all(each > settings.SERVERS_S for each in silent_s)
        return all_silent or waited_s > settings.CHIEF_LOST_S
    return all(min(waited_s, each) > settings.LOST_S for each in silent_s)


def _error(text: str) -> TowerError:
    limit_teardown()
    return TowerError(text)
