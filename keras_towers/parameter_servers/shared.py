"""Objects on a parameter server that all processes share by their names."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.parameter_servers.remote import run, traced

# How long a server may take for what needs no waiting.
_ANSWER_S = 30.0


def ask(function: Any, device: str) -> list[Any]:
    """Run a concrete function that has nothing to wait for, on one server.

    Raises:
        TowerError: the server does not answer.
        tf.errors.OpError: it cannot be reached.
    """
    try:
        return run(function, _ANSWER_S)
    except TimeoutError:
        spec = tf.DeviceSpec.from_string(device)
        raise TowerError(
            f"{spec.job} {spec.task} can be reached, but has not answered for "
            f"{_ANSWER_S:g} s: its process was stopped, or its machine hangs. "
            "Let it go on, or start all tasks of the job again, from a backup."
        ) from None


class Event:
    """Something that happens once, and that any process can wait for.

    It is a queue that nothing is put into, only closed. Every process that
    waits is released, and every later one at once. No process that dies can
    take anything with it.

    Args:
        name: of the event, the same in all processes.
        device: where it is.
    """

    def __init__(self, name: str, device: str):
        self._name = name
        self._device = device

    def set(self) -> None:
        """Let it happen; nothing if it has happened."""

        def body() -> None:
            tf.raw_ops.QueueCloseV2(handle=_queue(self._name))

        try:
            ask(traced(body, self._device), self._device)
        except tf.errors.CancelledError:
            return  # It was closed.

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has happened.

        Raises:
            TimeoutError: it has not.
            tf.errors.OpError: the server cannot be reached.
        """
        try:
            run(self._wait, timeout_s)
        except tf.errors.OutOfRangeError:
            return  # The queue is closed.

    @functools.cached_property
    def _wait(self) -> Any:
        def body() -> Any:
            return tf.raw_ops.QueueDequeueV2(
                handle=_queue(self._name), component_types=[tf.int64]
            )

        return traced(body, self._device)


class Mailbox:
    """Takes numbers from all processes, in the order in which they come.

    Args:
        name: the same in all processes.
        device: where it is.
    """

    def __init__(self, name: str, device: str):
        self._name = name
        self._device = device

    def put(self, number: int, timeout_s: float | None = None) -> int:
        """Put a number in.

        Returns:
            How many numbers are in it now.
        """

        def body() -> Any:
            queue = _queue(self._name)
            tf.raw_ops.QueueEnqueueV2(
                handle=queue, components=[tf.constant(number, tf.int64)]
            )
            return tf.raw_ops.QueueSizeV2(handle=queue)

        put = traced(body, self._device)
        if timeout_s is None:
            (size,) = ask(put, self._device)
        else:
            (size,) = run(put, timeout_s)
        return int(size)

    def take(self, timeout_s: float | None = None) -> int:
        """Take the first number out; wait until there is one.

        Raises:
            TimeoutError: none has come.
        """
        (number,) = run(self._take, timeout_s)
        return int(number)

    @functools.cached_property
    def _take(self) -> Any:
        def body() -> Any:
            return tf.raw_ops.QueueDequeueV2(
                handle=_queue(self._name), component_types=[tf.int64]
            )[0]

        return traced(body, self._device)


class Table:
    """A dictionary of strings by number.

    Args:
        name: the same in all processes.
        device: where it is.
    """

    def __init__(self, name: str, device: str):
        self._name = name
        self._device = device

    def insert(self, key: int, value: str) -> None:
        """Set the value of a key."""

        def body() -> None:
            tf.raw_ops.LookupTableInsertV2(
                table_handle=self._table(),
                keys=tf.constant([key], tf.int64),
                values=tf.constant([value]),
            )

        ask(traced(body, self._device), self._device)

    def items(self) -> dict[int, str]:
        """What is in it."""
        keys, values = ask(self._export, self._device)
        return {
            int(key): value.decode()
            for key, value in zip(keys.numpy(), values.numpy(), strict=True)
        }

    @functools.cached_property
    def _export(self) -> Any:
        def body() -> Any:
            return tf.raw_ops.LookupTableExportV2(
                table_handle=self._table(), Tkeys=tf.int64, Tvalues=tf.string
            )

        return traced(body, self._device)

    def _table(self) -> Any:
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.string, shared_name=self._name
        )


def _queue(name: str) -> Any:
    return tf.raw_ops.FIFOQueueV2(
        component_types=[tf.int64], shapes=[[]], shared_name=name
    )
