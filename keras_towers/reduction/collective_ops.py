"""Exchanges among devices by TensorFlow's collective ops, also over NCCL."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.reduction.collectives import (
    Collectives,
    Column,
    OnTowers,
    on_each,
)
from keras_towers.reduction.gradients import Gradient, dense_of
from keras_towers.transport import messages, nccl_trial
from keras_towers.transport.devices import all_on_host
from keras_towers.transport.messages import Rows

# The dtypes that TensorFlow's collectives send, on GPUs and on the host.
_ON_GPUS = (tf.float16, tf.float32, tf.float64, tf.int64)
_ON_HOST = (*_ON_GPUS, tf.bfloat16, tf.int32)

# TensorFlow identifies a group of devices by its key, with a fixed size, until
# the process ends. TensorFlow's own strategies count from 1.
_group_keys = itertools.count(1_000_000)

# TensorFlow also identifies each exchange by a key, and remembers its dtype, so
# a key belongs to one tensor in one graph. Each tensor cycles through this
# number of keys.
_KEYS_PER_TENSOR = 16

# The collection of a graph for what its runs add to keys.
_SLOTS = "keras_towers_slots"

_ADDS = {"merge_op": "Add", "final_op": "Id"}


@dataclasses.dataclass(frozen=True)
class _Group:
    """Devices that exchange tensors.

    Attributes:
        key: identifies them to TensorFlow.
        hint: TensorFlow's algorithm: ``"nccl"`` if it can run, else ``"ring"``.
    """

    key: int
    hint: str


class CollectiveOps(OnTowers):
    """Exchanges tensors by TensorFlow's collective ops.

    In the ring, every tower sends 2 (K-1)/K times the bytes of a sum, and half
    of that for rows (P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce
    algorithms for clusters of workstations, 2009). On different GPUs, NCCL
    exchanges. Ports modes "collective" and "nccl" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``.

    A step that fails on one tower fails with the same error on all towers; the
    next step works again. All collectives of a graph run, even if their results
    are unused, so that no tower leaves its peers waiting.

    Some tensors are exchanged as ``OnTowers`` does: slices, dtypes that cannot
    be sent, and shapes that are empty or unknown at tracing time. In eager code
    this applies to all, because an operation would wait forever for peers that
    are launched after it. The ring crashes on empty tensors (TF 2.21), and
    after a shape mismatch no collective op of the process works any more.

    Example:
        >>> ops, devices = CollectiveOps(), ["/device:CPU:0", "/device:CPU:1"]
        >>> @tf.function
        ... def step(grads):
        ...     return ops.all_reduce(grads, devices)
        >>> step([[tf.ones([2])], [tf.ones([2])]])[1][0].numpy()
        array([2., 2.], dtype=float32)
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._keys = itertools.count(0, _KEYS_PER_TENSOR)
        self._steps = compat.hidden_variable(0, tf.int64)
        # TensorFlow serializes the stateful ops of a graph, which would
        # deadlock collective peers, unless they use different resources: one
        # per device.
        self._orders: dict[str, tf.Variable] = {}

    def _sum(self, column: Column) -> Sequence[tf.Tensor]:
        sent = _summable(column)
        if sent is None:
            return super()._sum(column)
        sums = self._exchange(tf.raw_ops.CollectiveReduceV2, sent, **_ADDS)
        for total, tensor in zip(sums.tensors, sent.tensors, strict=True):
            total.set_shape(tensor.shape)
        return _summed(sums, column)

    def _scatter(self, column: Column) -> Sequence[tf.Tensor]:
        sent, rows = _summable(column), column.rows
        if sent is None or not rows.is_known:
            return super()._scatter(column)
        shape = sent.tensors[0].shape
        sizes = messages.elements_of_members([shape], [rows])

        def vector_of(tensor: tf.Tensor) -> tf.Tensor:
            vector, _ = messages.joined_rows([tensor], [rows])
            return messages.with_rows_each(vector, sizes)

        vectors = sent.with_tensors(sent.on_each(vector_of))
        if self._group_of(column.devices).hint == "nccl":
            operation = tf.raw_ops.CollectiveReduceScatterV2
            parts = self._exchange(operation, vectors, **_ADDS)
        else:
            parts = self._swap_and_add(vectors)
        own = parts.on_each(
            lambda part, size, shape: tf.reshape(part[:size], shape),
            sizes,
            rows.shapes(shape),
        )
        return _summed(column.with_tensors(own), column)

    def _swap_and_add(self, vectors: Column) -> Column:
        """Sum vectors; return an equal part of the sum for each device.

        TensorFlow has an operation for it on GPUs only.
        """
        number = len(vectors.devices)
        rows = vectors.on_each(lambda v: tf.reshape(v, [number, -1]))
        received = self._exchange(
            tf.raw_ops.CollectiveAllToAllV2, vectors.with_tensors(rows)
        )
        sums = received.on_each(lambda part: tf.reduce_sum(part, 0))
        return vectors.with_tensors(sums)

    def _gather(self, column: Column) -> Sequence[tf.Tensor]:
        first, rows = column.tensors[0], column.rows
        dtype, shape = first.dtype, rows.whole_shape(first.shape)
        # Its bits travel as those of another one.
        is_bfloat16 = dtype == tf.bfloat16
        sent_as = tf.float16 if is_bfloat16 else dtype
        if not _can_send(tf.TensorSpec(shape, sent_as), column.devices):
            return super()._gather(column)
        sizes = messages.elements_of_members([shape], [rows])

        def padded(tensor: tf.Tensor) -> tf.Tensor:
            sent = tf.bitcast(tensor, sent_as) if is_bfloat16 else tensor
            return messages.with_rows(tf.reshape(sent, [-1]), max(sizes))

        def whole(vector: tf.Tensor) -> tf.Tensor:
            parts = zip(tf.split(vector, len(sizes)), sizes, strict=True)
            own = tf.concat([part[:size] for part, size in parts], 0)
            (result,) = messages.wholes_of(own, [shape], [rows])
            return tf.bitcast(result, dtype) if is_bfloat16 else result

        vectors = column.with_tensors(column.on_each(padded))
        operation = tf.raw_ops.CollectiveGatherV2
        return self._exchange(operation, vectors).on_each(whole)

    def _exchange(
        self,
        operation: Callable[..., tf.Tensor],
        sent: Column,
        **arguments: object,
    ) -> Column:
        """Add an operation on each device; return its results."""
        group, first_key = self._group_of(sent.devices), next(self._keys)
        with tf.device(compat.HOST):
            instance_key = first_key + self._slot()
        received = sent.on_each(
            lambda tensor, device: operation(
                input=tensor,
                group_size=len(sent.devices),
                group_key=group.key,
                instance_key=instance_key,
                ordering_token=[self._order_on(device).handle],
                communication_hint=group.hint,
                **arguments,
            ),
            sent.devices,
        )
        return sent.with_tensors(received)

    def _group_of(self, devices: Sequence[str]) -> _Group:
        names = tuple(devices)
        if names not in self._groups:
            key = next(_group_keys)
            self._groups[names] = _Group(key, hint_for(devices))
        return self._groups[names]

    def _order_on(self, device: str) -> tf.Variable:
        if device not in self._orders:
            order = compat.hidden_variable(0, tf.float32, device)
            self._orders[device] = order
        return self._orders[device]

    def _slot(self) -> tf.Tensor:
        """Return a number to add to keys, which counts the runs of this graph.

        With a single key, two threads that run the same graph would mix up
        their buffers. With a new key for every step, TensorFlow would leak
        memory.
        """
        graph: tf.Graph = compat.get_default_graph()
        slots = graph.get_collection_ref(_SLOTS)
        for owner, slot in slots:
            if owner is self:
                return slot
        # Atomically.
        step = tf.raw_ops.ResourceCountUpTo(
            resource=self._steps.handle, limit=2**62, T=tf.int64
        )
        slot = tf.cast(step % _KEYS_PER_TENSOR, tf.int32)
        slots.append((self, slot))
        return slot


def hint_for(devices: Sequence[str]) -> str:
    """Return the algorithm of TensorFlow's collective ops on devices."""
    return "nccl" if nccl_available(devices)[0] else "ring"


def _can_send(
    tensor: tf.Tensor | tf.TensorSpec, devices: Sequence[str]
) -> bool:
    """Whether an operation can send a tensor, in the function being traced.

    Args:
        tensor: the tensor, or what is known of it.
        devices: the devices that exchange it.
    """
    dtypes = _ON_HOST if all_on_host(devices) else _ON_GPUS
    # Two operations on one device would wait for each other.
    if tf.executing_eagerly() or len({*devices}) < len(devices):
        return False
    return bool(tensor.shape.num_elements()) and tensor.dtype in dtypes


def _summable(column: Column) -> Column | None:
    """Return tensors in a dtype that an operation can sum; None: there is none.

    The dtype has all values of the original one.
    """

    def can_send(sent: Column) -> bool:
        return all(_can_send(t, sent.devices) for t in sent.tensors)

    if can_send(column):
        return column
    wider = column.with_tensors(column.on_each(messages.summable))
    return wider if can_send(wider) else None


def _summed(sums: Column, column: Column) -> list[tf.Tensor]:
    """Return sums in the dtype of the original tensors."""
    dtype = column.tensors[0].dtype
    return sums.on_each(lambda total: messages.summed(total, dtype))


def nccl_available(devices: Sequence[str]) -> tuple[bool, str]:
    """Return whether NCCL can sum over devices, and why (not), as a clause."""
    if len(devices) < 2:
        return False, "it needs at least two GPUs"
    # The physical GPU of each logical one.
    physical = [
        gpu.name
        for gpu in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]
    seen: dict[str, str] = {}
    for device in devices:
        spec = tf.DeviceSpec.from_string(device)
        if spec.device_type != "GPU":
            return False, f"{device} is not a GPU"
        index = spec.device_index or 0
        if index >= len(physical):
            return False, f"{device} does not exist"
        # NCCL refuses two ranks on one GPU.
        other = seen.setdefault(physical[index], device)
        if other is not device:
            return False, f"{other} and {device} are on the same physical GPU"
    return True, f"{len(devices)} different physical GPUs"


def failure_of(collectives: Collectives, devices: Sequence[str]) -> str:
    """Try each kind of exchange on small tensors; return why it fails, or "".

    Args:
        collectives: exchange them.
        devices: the K devices.
    """
    number = len(devices)

    @tf.function(autograph=False)
    def step() -> list[Gradient]:
        parts = on_each(devices, nccl_trial.part_of, range(number))
        sums = collectives.all_reduce([[part] for part in parts], devices)
        totals = [total for (total,) in sums]
        size = totals[0].shape[0]
        assert size is not None
        rows = [Rows(0, [size] * number)]
        repeated = on_each(devices, lambda p: tf.tile(p, [number]), parts)
        own = collectives.reduce_scatter([[r] for r in repeated], devices, rows)
        whole = collectives.all_gather(own, devices, rows)
        copies = collectives.broadcast(dense_of(totals[:1]), devices)
        gathered = [part for (row,) in whole for part in tf.split(row, number)]
        return [*totals, *gathered, *(copy for (copy,) in copies)]

    return nccl_trial.failure_of(step, number)
