"""Signs of life that workers give one another, on a parameter server."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.remote import reachable, traced
from keras_towers.parameter_servers.shared import ask

_BEAT_S = 2.0
# After how long without anybody listening at its address a worker has died.
_GONE_S = 10.0


class Pulse:
    """Tells that this worker goes on, and knows the same of all others.

    A process that was stopped can still be reached at its address: the kernel
    answers for it.

    Args:
        connection: this worker's.
        name: of what the workers share; the same in all.
    """

    def __init__(self, connection: Connection, name: str):
        self._connection = connection
        self._name = name
        self._device = connection.devices[0]
        self._last = -_BEAT_S

    def beat(self) -> None:
        """Tell that this worker goes on, not more often than need be."""
        now = time.monotonic()
        if now - self._last >= _BEAT_S:
            self._last = now
            ask(self._tell, self._device)

    def watch(self) -> Watch:
        """Begin to look at the others."""
        return Watch(self, self._connection)

    def beats(self) -> Mapping[int, float]:
        """What each worker has told last: another number each time."""
        keys, values = ask(self._read, self._device)
        pairs = zip(keys.numpy(), values.numpy(), strict=True)
        return {int(rank): float(number) for rank, number in pairs}

    @functools.cached_property
    def _tell(self) -> Any:
        def body() -> None:
            tf.raw_ops.LookupTableInsertV2(
                table_handle=self._table(),
                keys=tf.constant([self._connection.rank], tf.int64),
                values=tf.reshape(tf.timestamp(), [1]),
            )

        return traced(body, self._device)

    @functools.cached_property
    def _read(self) -> Any:
        def body() -> Any:
            return tf.raw_ops.LookupTableExportV2(
                table_handle=self._table(), Tkeys=tf.int64, Tvalues=tf.float64
            )

        return traced(body, self._device)

    def _table(self) -> Any:
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.float64, shared_name=self._name
        )


class Watch:
    """Looks at other workers for as long as this one waits.

    What was before does not count: all of them may have been busy.

    Args:
        pulse: what they tell.
        connection: this worker's.
    """

    def __init__(self, pulse: Pulse, connection: Connection):
        self._pulse = pulse
        self._connection = connection
        now = time.monotonic()
        self._told: Mapping[int, float] = {}
        self._heard = dict.fromkeys(range(connection.size), now)
        self._reached = dict.fromkeys(range(connection.size), now)

    def look(self) -> None:
        """Find out who has told something."""
        told = self._pulse.beats()
        now = time.monotonic()
        for rank, number in told.items():
            if self._told.get(rank) != number:
                self._heard[rank] = now
        self._told = told

    def is_gone(self, rank: int) -> bool:
        """Whether nobody has listened at the address of a worker for long."""
        now = time.monotonic()
        if self.reaches(rank):
            self._reached[rank] = now
        return now - self._reached[rank] > _GONE_S

    def reaches(self, rank: int) -> bool:
        """Whether anybody listens at the address of a worker."""
        return reachable(self._connection.cluster.workers[rank])

    def silent_s(self, rank: int) -> float:
        """For how many seconds a worker has told nothing."""
        return time.monotonic() - self._heard[rank]
