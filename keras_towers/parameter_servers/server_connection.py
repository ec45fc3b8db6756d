"""A worker's connection to the parameter servers and the other workers."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.message_lists import describe_each
from keras_towers.foundation.notices import announce
from keras_towers.foundation.object_types import Plain
from keras_towers.jobs.rendezvous import (
    liveness,
    rank_environment,
    separate_training,
    tf_config,
    watch,
)
from keras_towers.jobs.rendezvous.network import is_reachable, task_answers
from keras_towers.jobs.rendezvous.store import report_connected, wait_for
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.parameter_servers import key_value_store
from keras_towers.parameter_servers.key_value_store import KeyValueStore
from keras_towers.parameter_servers.remote_runtime import device_of, join
from keras_towers.parameter_servers.server_process import serve
from keras_towers.transport import plain_values

# A restarted server does not know its clients. Data sent over a link that broke
# may be lost.
_BROKEN: dict[type[tf.errors.OpError], str] = {
    tf.errors.AbortedError: (
        "a parameter server was started again, without what it held"
    ),
    tf.errors.UnavailableError: "the connection with a parameter server broke",
}

_connection: Connection | None = None


class DroppedResources:
    """Collects the names of shared resources whose owners were deleted."""

    def __init__(self) -> None:
        self._watched = 0
        self._names: list[str] = []

    def drop_with(self, owner: object, name: str) -> None:
        """Collect a name once its owner is deleted."""
        self._watched += 1
        weakref.finalize(owner, self._names.append, name).atexit = False

    def take_names(self) -> list[str]:
        """Return the names collected since the last call."""
        if self._watched:
            # Models are parts of reference cycles.
            gc.collect()
            self._watched = 0
        names, self._names[:] = list(self._names), []
        return names


class Connection:
    """The connection of a worker with the parameter servers of its job."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.rank: int = cluster.rank
        self.size: int = cluster.size
        self.devices: tuple[str, ...] = tuple(
            device_of(server) for server in range(len(cluster.ps))
        )
        self.store: KeyValueStore = KeyValueStore(
            self.devices[0], self.naming_lost_servers
        )
        self.prefix: str = key_value_store.prefix(cluster)
        self.dropped: DroppedResources = DroppedResources()
        self.finished: bool = True
        self._name = key_value_store.task_name(cluster, self.rank)
        _wait_for_servers(cluster, self._name)
        with self.naming_lost_servers():
            join(
                {
                    "ps": dict(enumerate(cluster.ps)),
                    "localhost": {0: cluster.address},
                },
                job="localhost",
                index=0,
            )
            report_connected(cluster.rank)
            for server in range(len(cluster.ps)):
                key_value_store.introduce(cluster, server)
            key = f"{self.prefix}starts-{self.rank}"
            self.starts: int = (self.store.get(key) or 0) + 1
            self.store.put(key, self.starts)
        self._watch = watch.AnswerWatch(
            range(len(cluster.ps)),
            lambda server: task_answers(cluster.ps[server]),
            settings.LOST_S,
            self._end_without,
        )
        self._watch.start()

    def _end_without(self, servers: Sequence[int]) -> None:
        """End this process, which may be waiting for a lost server."""
        names = _names({n: self.cluster.ps[n] for n in servers})
        lost = describe_each(dict.fromkeys(names, liveness.TaskState.LOST))
        watch.end_process(
            f"{self._name} must end: {lost}. Start all tasks of the job "
            "again, from a backup."
        )

    def disconnect(self) -> None:
        """Sign off at the servers, which end after the last worker.

        A worker that ends with an error does not: it may be restarted, and then
        needs the servers. The chief cannot be restarted, and signs off.
        """
        # Python sets it for an uncaught error.
        error = getattr(sys, "last_value", None)
        if self.finished and error is None:
            self._sign_off("")
        elif self.rank == 0 and not self.finished:
            self._sign_off(str(error or "") or "its fit did not end")
        self._watch.stop()

    def _sign_off(self, failure: str) -> None:
        for server in range(len(self.devices)):
            # The server may have died.
            with contextlib.suppress(tf.errors.OpError, TowerError):
                goodbyes = key_value_store.goodbyes_key(self.cluster)
                store = key_value_store.store_on(server)
                store.put(f"{goodbyes}-{self.rank}", failure)

    @contextlib.contextmanager
    def naming_lost_servers(self) -> Iterator[None]:
        """Turn errors caused by a lost server into ones that name it."""
        try:
            yield
        except tf.errors.OpError as error:
            time.sleep(settings.SOCKET_CLOSE_S)
            reason = _BROKEN.get(type(error))
            servers = enumerate(self.cluster.ps)
            lost = {n: a for n, a in servers if not is_reachable(a)}
            if lost:
                state = "can no longer be reached"
                reason = describe_each(dict.fromkeys(_names(lost), state))
            if reason is None:
                raise
            first, *_ = str(error.message).strip().splitlines() or [""]
            raise TowerError(
                f"{self._name} must end: {reason}. Start all tasks of the "
                f"job again, from a backup. ({type(error).__name__}: {first})"
            ) from error


def _wait_for_servers(cluster: Cluster, name: str) -> None:
    missing = dict(enumerate(cluster.ps))
    limit_s = rank_environment.meeting_limit_s()
    for waited_s in liveness.wait_loop(limit_s, settings.NETWORK_POLL_S):
        missing = {i: a for i, a in missing.items() if not is_reachable(a)}
        if not missing:
            return
        if waited_s:
            announce(f"{name} waits for {', '.join(_names(missing))}")
    raise TowerError(
        f"{name} has waited {limit_s:g} s for {', '.join(_names(missing))}: "
        "start all tasks that TF_CONFIG names, or set "
        f"{settings.ENV_RENDEZVOUS_TIMEOUT} to more seconds."
    )


def take_role(strategy: str, cluster: Cluster | None = None) -> Connection:
    """Serve if this process is a ps task; connect to the servers if it trains.

    In a ps task this function does not return: the process ends with exit code
    0 when training has ended. A worker waits for all servers and connects once;
    call this before TensorFlow starts, that is, before the first model.
    """
    global _connection
    cluster = cluster or tf_config.required(options="--ps 1 --workers {}")
    if not cluster.ps:
        raise TowerError(
            f"{strategy} keeps its variables on parameter servers, but "
            'TF_CONFIG names none: add "ps" to "cluster", for example '
            f"{tf_config.EXAMPLE}, or start the script with `keras-towers run "
            "--ps 1 --workers 2`"
        )
    if cluster.role == "ps":
        serve(cluster)
        raise SystemExit(0)
    if not cluster.trains:
        raise TowerError(
            f"{strategy} does not use the task {cluster}: leave it out of "
            "TF_CONFIG, and evaluate the chief's checkpoints in another script"
        )
    separate_training.refuse_child()
    # `keras-towers run` connects a script when it first asks for this.
    tf.distribute.get_strategy()
    if _connection is None:
        _connection = Connection(cluster)
        separate_training.take_place(cluster)
        atexit.register(_connection.disconnect)
        atexit.register(watch.tell_error, cluster.rank)
    elif _connection.cluster != cluster:
        raise TowerError(
            f"this process is already {_connection.cluster} of another job: "
            f"start another process for {cluster}"
        )
    return _connection


def _names(servers: dict[int, str]) -> list[str]:
    return [f"ps {i} at {a}" for i, a in servers.items()]


class ServerPeers:
    """The workers of a job, which exchange values through the first server."""

    name = "TensorFlow's parameter servers"

    def __init__(
        self, connection: Connection, prefix: str, stall_timeout_s: float
    ):
        self.connection: Connection = connection
        cluster = connection.cluster
        self.rank: int = cluster.rank
        self.size: int = cluster.size
        self.local_rank: int = cluster.local_rank
        self.local_size: int = cluster.local_size
        self.prefix = prefix
        self.stall_timeout_s = stall_timeout_s
        self._number = 0
        self._poll: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def polling(self, poll: Callable[[], None]) -> Iterator[None]:
        """Call a function regularly while this worker waits in the block."""
        before, self._poll = self._poll, poll
        try:
            yield
        finally:
            self._poll = before

    def gather_objects(self, value: Plain) -> list[Plain]:
        """Return the values of all workers, by rank.

        The chief collects the values and removes duplicates. If every worker
        read every value, the server would send N² of them.
        """
        self._number += 1
        where = f"{self.prefix}/gathered/{self._number}"
        store = self.connection.store
        self._refuse_second_chief(f"{where}-0")
        own = plain_values.encode(value).decode()
        store.put(f"{where}-{self.rank}", own)
        if self.rank == 0:
            values = self._await(lambda: self._all_values(where), where)
            texts = list(dict.fromkeys(values))
            numbers = [texts.index(text) for text in values]
            store.put(where, [texts, numbers])
        else:
            texts, numbers = self._await(lambda: store.get(where), where)
            values = [texts[number] for number in numbers]
        # A worker that was restarted may have another value than before.
        values[self.rank] = own
        return [plain_values.decode(text.encode()) for text in values]

    def _all_values(self, key: str) -> list[str] | None:
        values = self.connection.store.by_rank(key, range(self.size))
        return [*values.values()] if len(values) == self.size else None

    def _refuse_second_chief(self, key: str) -> None:
        """Refuse a restarted chief if the first one had gathered values."""
        again = self.rank == 0 and self.connection.starts > 1
        if again and self.connection.store.get(key) is not None:
            raise TowerError(
                "the chief of this job was restarted alone after training "
                "had begun, and has lost the state of the training: start all "
                "tasks of the job again, from a backup."
            )

    def _await(self, read: Callable[[], Plain | None], key: str) -> Plain:
        cluster = self.connection.cluster
        me = key_value_store.task_name(cluster, self.rank)
        look_s = min(settings.LIVENESS_CHECK_S, self.stall_timeout_s)
        missing_tasks = ""
        for waited_s in liveness.wait_loop(self.stall_timeout_s, 0):
            try:
                return wait_for(lambda _: read(), look_s)
            except TimeoutError:
                self._poll()
            arrived = self.connection.store.by_rank(key, range(self.size))
            missing = [r for r in range(self.size) if r not in arrived] or [0]
            missing_tasks = ", ".join(
                key_value_store.task_name(cluster, rank)
                for rank in missing[: settings.MAX_RANKS_NAMED]
            )
            if waited_s:
                announce(f"{me} waits for {missing_tasks}")
        raise TowerError(
            f"{me} has waited {self.stall_timeout_s:g} s for "
            f"{missing_tasks}. Every task that TF_CONFIG names must run the "
            "script, and call the same methods in the same order. To wait "
            "longer, raise stall_timeout_s."
        )
