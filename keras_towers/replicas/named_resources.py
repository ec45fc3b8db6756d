"""Named resources of TensorFlow's runtime, and functions that use them.

A resource lives on its device until it is destroyed, or its process ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.foundation.object_types import ConcreteFunction

# The handles of this process: by name, with the device.
_known: dict[str, tuple[tf.Tensor, str]] = {}


def make_handle(
    name: str, device: str, make: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Create the handle of a named resource, and register it for ``free``."""
    with compat.outside(device):
        handle = make()
    _known[name] = handle, device
    return handle


def free(name: str) -> None:
    """Free the resource of this name, and all resources ``name/...``.

    They must not be in use. Only registered resources are freed.
    """
    for handle, device in forget(name):
        with compat.outside(device):
            tf.raw_ops.DestroyResourceOp(
                resource=handle, ignore_lookup_error=True
            )


def forget(name: str) -> list[tuple[tf.Tensor, str]]:
    """Drop and return the handles of ``free``, for another process to free."""
    beneath = f"{name}/"
    # A copy: garbage collection may free other resources meanwhile.
    mine = [n for n in list(_known) if n == name or n.startswith(beneath)]
    return [_known.pop(n) for n in mine]


class Queue:
    """An unbounded queue of integers, or of tuples of them, on one device."""

    def __init__(self, name: str, device: str, width: int = 1):
        self._device = device
        self._dtypes = [tf.int64] * width
        self._handle = make_handle(
            name,
            device,
            lambda: tf.raw_ops.FIFOQueueV2(
                component_types=self._dtypes,
                shapes=[[]] * width,
                shared_name=name,
            ),
        )

    def put(self, *values: int | tf.Tensor) -> tf.Operation | None:
        """Add one element."""
        with tf.device(self._device):
            return tf.raw_ops.QueueEnqueueV2(
                handle=self._handle, components=self._cast(values)
            )

    def put_many(self, *values: tf.Tensor) -> tf.Operation | None:
        """Add N elements, whose parts have shape [N]."""
        with tf.device(self._device):
            return tf.raw_ops.QueueEnqueueManyV2(
                handle=self._handle, components=self._cast(values)
            )

    def _cast(self, values: Sequence[int | tf.Tensor]) -> list[tf.Tensor]:
        return [tf.cast(value, tf.int64) for value in values]

    def get(self) -> list[tf.Tensor]:
        """Remove and return the first element; wait if there is none."""
        with tf.device(self._device):
            parts = tf.raw_ops.QueueDequeueV2(
                handle=self._handle, component_types=self._dtypes
            )
        return [tf.ensure_shape(part, ()) for part in parts]

    def put_if_empty(self, value: tf.Tensor) -> tf.Operation | None:
        """Add one element if there is none when its value is known."""
        with tf.device(self._device), tf.control_dependencies([value]):
            size = tf.raw_ops.QueueSizeV2(handle=self._handle)
            missing = tf.cast(tf.equal(size, 0), tf.int32)
            return self.put_many(tf.fill([missing], value))

    def wait_for(
        self, number: tf.Tensor, latest: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """Wait for a number that is large enough, and return it.

        Args:
            number: the least that is large enough.
            latest: reads a number that only increases, after every element
                that was removed: an element may be older than it.
        """

        def remove_one(_: tf.Tensor) -> tf.Tensor:
            (number_removed,) = self.get()
            with tf.control_dependencies([number_removed]):
                return tf.maximum(number_removed, latest())

        with tf.device(self._device):
            (is_there,) = tf.while_loop(
                lambda last: last < number, remove_one, [latest()]
            )
            return tf.identity(is_there)

    def clear(self) -> None:
        """Remove all elements; only one process may do so at a time."""
        with tf.device(self._device):
            size = tf.raw_ops.QueueSizeV2(handle=self._handle)
            tf.raw_ops.QueueDequeueManyV2(
                handle=self._handle, n=size, component_types=self._dtypes
            )


def variable(
    name: str, device: str, shape: Sequence[int], dtype: tf.DType
) -> tf.Variable:
    """Return the variable of this name, uninitialized."""
    own = []

    def make() -> tf.Tensor:
        own.append(compat.shared_variable(name, tf.TensorShape(shape), dtype))
        return own[0].handle

    make_handle(name, device, make)
    return own[0]


RunFunction: TypeAlias = "Callable[[ConcreteFunction], list[tf.Tensor]]"
"""Runs a function without arguments; returns its outputs as a list."""


def run_flat(function: ConcreteFunction) -> list[tf.Tensor]:
    """Call a concrete function; return its outputs as a list."""
    return tf.nest.flatten(function(), expand_composites=True)


def trace(
    body: Callable[..., object], *specs: tf.TensorSpec
) -> ConcreteFunction:
    """Trace operations as a concrete function.

    An eager operation that fails on a remote device breaks all that this
    process runs there later; a function only raises its error.
    """

    def function(*tensors: tf.Tensor) -> object:
        result = body(*tensors)
        return None if isinstance(result, tf.Operation) else result

    with compat.single_device_mode():
        traced = tf.function(function, autograph=False)
        return traced.get_concrete_function(*specs)


class TracedFunctions:
    """Runs operations as functions without arguments, traced once per key."""

    def __init__(self, run: RunFunction = run_flat):
        self._run = run
        self._traced: dict[object, ConcreteFunction] = {}

    def __call__(
        self, key: object, body: Callable[[], object]
    ) -> list[tf.Tensor]:
        """Run the operations of ``body``, traced for ``key``."""
        return self._run(self.traced(key, body))

    def traced(
        self, key: object, body: Callable[[], object]
    ) -> ConcreteFunction:
        """Return the concrete function of ``body``, traced for ``key``."""
        if key not in self._traced:
            self._traced[key] = trace(body)
        return self._traced[key]

    def forget(self) -> None:
        """Drop all traces."""
        self._traced.clear()


def after_writes_of(
    function: Callable[..., object], *args: object
) -> tf.Tensor:
    """Call a function; return a tensor that is ready after its writes."""
    begun = len(compat.get_default_graph().get_operations())
    function(*args)
    with after_writes(begun):
        return tf.constant(True)


@contextlib.contextmanager
def after_writes(begun: int = 0) -> Iterator[None]:
    """Run the operations of this block after all earlier writes."""
    operations = compat.get_default_graph().get_operations()[begun:]
    writes = [op for op in operations if op.op_def.is_stateful]
    with tf.control_dependencies(writes):
        yield
