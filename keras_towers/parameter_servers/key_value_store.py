"""A job's key-value store: a hash table on a parameter server.

In it, tasks compare their jobs and versions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import ConcreteFunction
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.store import wait_for
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.parameter_servers.remote_runtime import (
    RunningFunction,
    device_of,
)
from keras_towers.replicas.named_resources import trace

_NAME = "keras_towers/store"
# Shared by all jobs, so that a task finds out that a server is another job's.
_COMMON = "keras_towers"
# The number of the server among the ranks of workers.
_SERVER = -1


class KeyValueStore:
    """A store of JSON values that lives as long as its parameter server.

    Keys are data, not names in a graph: a server keeps two functions of each
    process, whatever the number of keys.

    Raises:
        TowerError: the server does not answer.
        tf.errors.OpError: the server cannot be reached.
    """

    def __init__(
        self,
        device: str,
        around: Callable[
            [], contextlib.AbstractContextManager[None]
        ] = contextlib.nullcontext,
    ):
        self._device = device
        self._around = around

    def get(self, key: str) -> Any:
        """Return a value, or None if it was never written."""
        return self._find([key])[0]

    def by_rank(self, key: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the values written at ``key-rank``, by rank."""
        values = self._find([f"{key}-{rank}" for rank in ranks])
        both = zip(ranks, values, strict=True)
        return {rank: value for rank, value in both if value is not None}

    def put(self, key: str, value: object) -> None:
        """Write a value."""
        _, write = _functions(self._device)
        text = tf.constant([json.dumps(value)])
        self._request(write, _numbers([key]), text)

    def _find(self, keys: Sequence[str]) -> list[Any]:
        """Read the values of keys in one request."""
        read, _ = _functions(self._device)
        (texts,) = self._request(read, _numbers(keys))
        return [json.loads(text) if text else None for text in texts.numpy()]

    def _request(
        self, function: ConcreteFunction, *arguments: tf.Tensor
    ) -> list[tf.Tensor]:
        """Run a function that returns at once."""
        try:
            with self._around():
                return RunningFunction(function, arguments).wait(
                    settings.ANSWER_S
                )
        except TimeoutError:
            spec = tf.DeviceSpec.from_string(self._device)
            raise TowerError(
                f"{spec.job} {spec.task} can be reached, but has not answered "
                f"for {settings.ANSWER_S:g} s: its process was stopped, or its "
                "machine hangs. Resume the process, or start all tasks of "
                "the job again, from a backup."
            ) from None

    def read(self, key: str) -> tf.Tensor:
        """Read a value inside a function; ``value_of`` decodes it."""
        return _read(self._device, _numbers([key]))[0]

    def write(
        self, keys: Sequence[str], index: tf.Tensor, integers: tf.Tensor
    ) -> tf.Operation:
        """Write a list of integers at one of the keys, inside a function."""
        chosen = tf.gather(_numbers(keys), [index])
        texts = tf.strings.as_string(integers)
        text = tf.strings.reduce_join(texts, separator=",")
        return _write(self._device, chosen, tf.strings.join(["[", [text], "]"]))


def value_of(read: tf.Tensor) -> Any:
    """Decode the result of ``KeyValueStore.read``; None if it has no value."""
    text: Any = read.numpy()
    return json.loads(text) if text else None


def _numbers(keys: Sequence[str]) -> tf.Tensor:
    # TensorFlow has no table from strings to strings.
    digests = [hashlib.sha256(key.encode()).digest()[:8] for key in keys]
    numbers = [int.from_bytes(digest, signed=True) for digest in digests]
    return tf.constant(numbers, tf.int64)


@functools.cache
def _functions(device: str) -> tuple[ConcreteFunction, ConcreteFunction]:
    """Return the functions that read and write values on a device."""
    numbers = tf.TensorSpec((None,), tf.int64)
    texts = tf.TensorSpec((None,), tf.string)
    return (
        trace(functools.partial(_read, device), numbers),
        trace(functools.partial(_write, device), numbers, texts),
    )


def _read(device: str, numbers: tf.Tensor) -> tf.Tensor:
    with tf.device(device):
        return tf.raw_ops.LookupTableFindV2(
            table_handle=_table(), keys=numbers, default_value=tf.constant("")
        )


def _write(device: str, numbers: tf.Tensor, texts: tf.Tensor) -> tf.Operation:
    with tf.device(device):
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=_table(), keys=numbers, values=texts
        )


def _table() -> tf.Tensor:
    return tf.raw_ops.MutableHashTableV2(
        key_dtype=tf.int64, value_dtype=tf.string, shared_name=_NAME
    )


def store_on(server: int) -> KeyValueStore:
    """Return the store on a parameter server."""
    return KeyValueStore(device_of(server))


def prefix(cluster: Cluster) -> str:
    """Return the prefix of all names shared by a job, unique to it."""
    digest = hashlib.sha256(cluster.identity().encode()).hexdigest()
    return f"{_COMMON}/{digest[:12]}/"


def task_name(cluster: Cluster, rank: int) -> str:
    """Return the name of a worker in messages, such as ``"worker 1"``."""
    role, index = cluster.tasks[rank]
    return f"{role} {index}"


def goodbyes_key(cluster: Cluster) -> str:
    """Return the key at which workers sign off; empty text means success."""
    return f"{prefix(cluster)}goodbyes"


def introduce(cluster: Cluster, server: int) -> None:
    """Register this process at a parameter server, and compare versions."""
    me = f"{cluster.role} {cluster.index}"
    facts = rank_checks.process_facts()
    introduction = {"name": me, "facts": facts, "jobs": cluster.identity()}
    rank = cluster.rank if cluster.trains else _SERVER
    store = store_on(server)
    store.put(_introduction(rank), introduction)
    # Tasks that are equal to the server are equal to one another.
    try:
        first = wait_for(
            lambda _: store.get(_introduction(_SERVER)), settings.ANSWER_S
        )
    except TimeoutError:
        raise TowerError(
            f"ps {server} at {cluster.ps[server]} runs a server of TensorFlow "
            "but not this job's script, or hangs: it has not introduced "
            f"itself for {settings.ANSWER_S:g} s. Start the same script in "
            "all tasks of the job, also in parameter servers."
        ) from None
    other = first["name"]
    rank_checks.compare_facts(me, facts, other, first["facts"])
    if first["jobs"] != introduction["jobs"]:
        raise TowerError(
            f'{me} has a different "cluster" in TF_CONFIG than {other}: '
            f"{introduction['jobs']} instead of {first['jobs']}. Give all "
            "tasks of a job the same cluster, and each job its own parameter "
            "servers."
        )


def has_started(store: KeyValueStore, rank: int) -> bool:
    """Whether a worker has registered at the server of a store."""
    return store.get(_introduction(rank)) is not None


def _introduction(rank: int) -> str:
    return f"{_COMMON}/introductions-{rank}"
