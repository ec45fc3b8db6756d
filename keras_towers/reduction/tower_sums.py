"""Sums over the towers of a process: by additions, collective ops, or NCCL."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import (
    all_on_host,
    as_whole_number,
    host_of,
    same_devices,
)
from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    Reduction,
    check_towers,
    dense_of,
    in_order,
    is_sparse,
    sparse_of,
)
from keras_towers.transport import nccl_trial
from keras_towers.transport.messages import (
    buckets,
    pack,
    summable,
    summed,
    unpack,
)


def add_on(device: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sum tensors of equal shape and dtype on one device."""
    with tf.device(device):
        return tf.add_n(list(tensors))


def copy_to(device: str, tensor: tf.Tensor) -> tf.Tensor:
    """Copy a tensor to a device; no copy if it is already there."""
    with tf.device(device):
        return tf.identity(tensor)


def concat_slices(
    slices: Sequence[tf.IndexedSlices], main: str, devices: Sequence[str]
) -> list[tf.IndexedSlices]:
    """Concatenate the slices of K towers on one device; copy them to all.

    A row may occur several times, for example if a variable is gathered from
    twice; optimizers add such rows up.
    """
    with tf.device(main):
        values = tf.concat([part.values for part in slices], axis=0)
        indices = tf.concat([part.indices for part in slices], axis=0)
    return [
        tf.IndexedSlices(
            copy_to(device, values),
            copy_to(device, indices),
            slices[0].dense_shape,
        )
        for device in devices
    ]


def reduce_each(
    grads: Gradients,
    devices: Sequence[str],
    dense: Callable[[int, Sequence[tf.Tensor]], Sequence[tf.Tensor]],
    sparse_on: Callable[[int], str] | None = None,
) -> list[list[Gradient]]:
    """Reduce gradient by gradient, from last to first."""
    check_towers(grads, devices)
    if len(grads) == 1:
        return [list(grads[0])]
    # Tower i mod K concatenates the slices of gradient i, to spread the work.
    sparse_on = sparse_on or (lambda index: devices[index % len(devices)])
    columns: list[Sequence[Gradient]] = []
    # The backward pass computes gradients in this order: where ops keep their
    # order, reduction can then start before the backward pass ends.
    for index, column in reversed(list(enumerate(zip(*grads, strict=True)))):
        if is_sparse(column[0]):
            columns.append(concat_slices(column, sparse_on(index), devices))
        else:
            columns.append(dense(index, column))
    columns.reverse()
    return [[column[k] for column in columns] for k in range(len(grads))]


def _sum_at(
    place: Callable[[int], str], grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum gradient i on ``place(i)``, and copy the sum to all towers."""

    def dense(index: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        total = add_on(place(index), tensors)
        return [copy_to(device, total) for device in devices]

    return reduce_each(grads, devices, dense, place)


def sum_on_host(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum all gradients on the host.

    Gradients are copied to the first CPU of the towers' machine and back: best
    if the GPUs cannot access each other directly. If the towers are logical
    CPUs, the host is the first of them. Ports mode "cpu" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``.

    Example:
        >>> devices = ["/device:GPU:0", "/device:GPU:1"]
        >>> sums = sum_on_host([[tf.ones([2])], [tf.ones([2])]], devices)
        >>> sums[1][0].numpy()
        array([2., 2.], dtype=float32)
    """
    return _sum_at(lambda _: host_of(devices[0]), grads, devices)


def sum_on_towers(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum gradient i on tower i mod K.

    This spreads the work and the traffic over the towers. Ports mode "gpu" of
    tensorpack's ``SyncMultiGPUTrainerReplicated``, which divides the variables
    among the GPUs in the same way.
    """
    return _sum_at(lambda i: devices[i % len(devices)], grads, devices)


def sum_at_variables(
    grads: Gradients, devices: Sequence[str], places: Sequence[str]
) -> list[Gradient]:
    """Sum gradient i of all towers on device i only; return N sums.

    Ports tensorpack's ``SyncMultiGPUParameterServerBuilder``.
    """
    check_towers(grads, devices)
    if len(grads) == 1:
        return list(grads[0])
    return [
        concat_slices(column, place, [place])[0]
        if is_sparse(column[0])
        else add_on(place, column)
        for column, place in zip(zip(*grads, strict=True), places, strict=True)
    ]


def hierarchical_all_reduce(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum within two groups, then across them.

    Only the main devices of the groups communicate across groups: on a DGX-1, a
    group is four GPUs with direct links to each other. The main devices rotate
    (number i mod K/2 of each group for gradient i), so that all links between
    the groups are used. Ports mode "hierarchical" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``, which supports only eight GPUs.

    Args:
        grads: gradients of an even number of towers, or of one.
        devices: the towers' devices.
    """
    half = len(devices) // 2

    def dense(index: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        mains = [devices[index % half], devices[half + index % half]]
        inside = [
            add_on(mains[0], tensors[:half]),
            add_on(mains[1], tensors[half:]),
        ]
        totals = [add_on(main, inside) for main in mains]
        return [
            copy_to(device, totals[k // half])
            for k, device in enumerate(devices)
        ]

    return reduce_each(grads, devices, dense)


def reduce_in_graph(
    grads: Gradients,
    devices: Sequence[str],
    dtypes: Collection[tf.DType],
    operation: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]],
) -> list[list[Gradient]]:
    """Sum by collective operations, one on each tower.

    Other dtypes are sent as one of ``dtypes`` that has all of their values.
    Some gradients are summed on the towers in turn instead: slices, dtypes that
    cannot be sent, and shapes that are empty or unknown at tracing time. In
    eager code this applies to all gradients, because an operation would wait
    forever for peers that are launched after it.
    """
    if tf.executing_eagerly():
        return sum_on_towers(grads, devices)

    def dense(index: int, tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        dtype, sent = tensors[0].dtype, tensors
        known = all(tensor.shape.num_elements() for tensor in tensors)
        if known and dtype not in dtypes:
            sent = on_each(summable, tensors)
        if not known or sent[0].dtype not in dtypes:
            total = add_on(devices[index % len(devices)], tensors)
            return [copy_to(device, total) for device in devices]
        sums = operation(sent)
        return sums if dtype in dtypes else on_each(summed, sums, dtype)

    def on_each(
        function: Callable[..., tf.Tensor],
        tensors: Sequence[tf.Tensor],
        *args: Any,
    ) -> list[tf.Tensor]:
        converted = []
        for device, tensor in zip(devices, tensors, strict=True):
            with tf.device(device):
                converted.append(function(tensor, *args))
        return converted

    return reduce_each(grads, devices, dense)


# The dtypes that TensorFlow's collectives sum, on GPUs and on the host.
_ON_GPUS = (tf.float16, tf.float32, tf.float64, tf.int64)
_ON_HOST = (*_ON_GPUS, tf.bfloat16, tf.int32)

# TensorFlow identifies a group of devices by its key, with a fixed size, until
# the process ends. TensorFlow's own strategies count from 1.
_group_keys = itertools.count(1_000_000)

# TensorFlow also identifies each reduction by a key, and remembers its dtype,
# so a key belongs to one gradient in one graph. Each gradient cycles through
# this number of keys.
_KEYS_PER_GRADIENT = 16


class CollectiveAllReduce:
    """Sums gradients with TensorFlow's collective ops.

    In the ring, every tower sends 2 (K-1)/K times its bytes (P. Patarasuk, X.
    Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations,
    2009). Ports mode "collective" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``.

    A step that fails on one tower fails with the same error on all towers; the
    next step works again. All collectives of a graph run, even if their results
    are unused, so that no tower leaves its peers waiting.

    See ``reduce_in_graph`` for gradients that are summed differently. The ring
    crashes on empty tensors (TF 2.21), and after a shape mismatch no collective
    op of the process works any more.

    Args:
        devices: the names of K devices.

    Attributes:
        devices: the names of the devices.
        hint: TensorFlow's algorithm: ``"nccl"`` if it can run, else ``"ring"``.

    Example:
        >>> reduce = CollectiveAllReduce(["/device:CPU:0", "/device:CPU:1"])
        >>> @tf.function
        ... def step(grads):
        ...     return reduce(grads, reduce.devices)
        >>> step([[tf.ones([2])], [tf.ones([2])]])[1][0].numpy()
        array([2., 2.], dtype=float32)
    """

    def __init__(self, devices: Sequence[str]):
        self.devices: tuple[str, ...] = tuple(devices)
        self.hint: str = "nccl" if nccl_available(devices)[0] else "ring"
        self._host = host_of(devices[0])
        self._group_key = next(_group_keys)
        self._keys = itertools.count(0, _KEYS_PER_GRADIENT)
        self._steps = compat.hidden_variable(0, tf.int64, self._host)
        # TensorFlow serializes the stateful ops of a graph, which would
        # deadlock collective peers, unless they use different resources: one
        # per device.
        self._orders = [
            compat.hidden_variable(0, tf.float32, device) for device in devices
        ]

    def __call__(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        """Sum the gradients of towers on ``self.devices``."""
        if not same_devices(devices, self.devices):
            raise TowerError(
                f"This reduction was created for {', '.join(self.devices)}, "
                f"not for {', '.join(devices)}. Create one for each set of "
                "devices."
            )
        slot = None if tf.executing_eagerly() else self._next_slot()
        return reduce_in_graph(
            grads,
            devices,
            _ON_HOST if all_on_host(devices) else _ON_GPUS,
            functools.partial(self._all_reduce, slot),
        )

    def _all_reduce(
        self, slot: tf.Tensor | None, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        assert slot is not None, "collective operations run in graphs"
        first_key = next(self._keys)
        with tf.device(self._host):
            instance_key = first_key + slot
        sums = []
        for device, order, tensor in zip(
            self.devices, self._orders, tensors, strict=True
        ):
            with tf.device(device):
                total = tf.raw_ops.CollectiveReduceV2(
                    input=tensor,
                    group_size=len(self.devices),
                    group_key=self._group_key,
                    instance_key=instance_key,
                    ordering_token=[order.handle],
                    merge_op="Add",
                    final_op="Id",
                    communication_hint=self.hint,
                )
            total.set_shape(tensor.shape)
            sums.append(total)
        return sums

    def _next_slot(self) -> tf.Tensor:
        """Count a step atomically; return what it adds to a gradient's key.

        With a single key, two threads that run the same graph would mix up
        their buffers. With a new key for every step, TensorFlow would leak
        memory.
        """
        with tf.device(self._host):
            step = tf.raw_ops.ResourceCountUpTo(
                resource=self._steps.handle, limit=2**62, T=tf.int64
            )
            return tf.cast(step % _KEYS_PER_GRADIENT, tf.int32)


# The dtypes that TensorFlow's kernel supports.
_NCCL_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)

_names = itertools.count()


def nccl_all_reduce(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum dense gradients on K physical GPUs of this process with NCCL.

    ``reduce_in_graph`` sums other gradients. Ports mode "nccl" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``.
    """

    def all_reduce(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        name = f"keras_towers_{next(_names)}"
        sums = []
        for device, tensor in zip(devices, tensors, strict=True):
            with tf.device(device):
                sums.append(
                    tf.raw_ops.NcclAllReduce(
                        input=tensor,
                        reduction="sum",
                        num_devices=len(devices),
                        shared_name=name,
                    )
                )
        # An op that waits for its peers hangs if one of them is pruned from the
        # graph because its result is unused: each depends on all of them.
        with tf.control_dependencies(sums):
            return list(map(copy_to, devices, sums))

    return reduce_in_graph(grads, devices, _NCCL_DTYPES, all_reduce)


def nccl_available(devices: Sequence[str]) -> tuple[bool, str]:
    """Whether NCCL can sum over these devices, and why (not), as a clause."""
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


def failure_of_sum(reduce: Reduction, devices: Sequence[str]) -> str:
    """Sum a small tensor of each device; return why that fails, or nothing."""

    @tf.function(autograph=False)
    def step() -> list[Gradient]:
        parts = []
        for k, device in enumerate(devices):
            with tf.device(device):
                parts.append([nccl_trial.part_of(k)])
        return [row[0] for row in reduce(parts, devices)]

    return nccl_trial.failure_of(step, len(devices))


@dataclasses.dataclass(frozen=True)
class GradientPacker:
    """Decides how gradients are packed into buffers.

    Each reduction of a buffer costs a launch and a round of messages. A few
    buffers keep this overhead low, while several can still run concurrently:
    a buffer is reduced while gradients for other buffers are still computed. A
    gradient is never divided, so one that is larger than a buffer is reduced
    alone. After tensorpack's ``GradientPacker``, which needs a single dtype and
    known shapes; here each dtype has separate buffers, and gradients of unknown
    shapes are reduced alone.

    Args:
        num_split: the approximate number of buffers for each dtype.
        min_elements: the smallest number of elements in a buffer: few or small
            gradients need fewer buffers than ``num_split``.

    Raises:
        TowerError: a number of buffers or elements that is not positive.

    Example:
        >>> packer = GradientPacker(num_split=2, min_elements=1)
        >>> packer.groups([tf.zeros([2, 2]), tf.zeros([]), tf.zeros([3])])
        [[0], [2, 1]]
    """

    num_split: int = 8
    min_elements: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (as_whole_number(value) or 0) < 1:
                raise TowerError(
                    f"{name}={value!r}: give a whole number, 1 or more."
                )

    def groups(self, grads: Sequence[tf.Tensor]) -> list[list[int]]:
        """Return the indices of the gradients of each buffer."""
        groups = []
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            indices = [i for i, g in enumerate(grads) if g.dtype == dtype]
            of_dtype = [grads[i] for i in indices]
            total = sum(g.shape.num_elements() or 0 for g in of_dtype)
            elements = max(self.min_elements, -(-total // self.num_split))
            for group in reversed(buckets(of_dtype, elements * dtype.size)):
                groups.append([indices[i] for i in group])
        return groups


class PackedReduction:
    """Applies a reduction to packed gradients, with the same sums.

    Each tower packs and unpacks on its own device, with tower 0's shapes.
    IndexedSlices are passed to the reduction unchanged.

    Args:
        reduction: reduces K lists of buffers.
        packer: decides which gradients share a buffer.

    Example:
        >>> packer = GradientPacker()
        >>> reduce = PackedReduction(hierarchical_all_reduce, packer)
    """

    def __init__(self, reduction: Reduction, packer: GradientPacker):
        self._reduction = reduction
        self._packer = packer

    def __call__(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        """Return K lists of the sums of N gradients."""
        check_towers(grads, devices)
        like = grads[0]
        if len(grads) == 1:
            return self._reduction(grads, devices)
        first = dense_of(like)
        groups = self._packer.groups(first)
        rows: list[list[Gradient]] = []
        for device, row in zip(devices, grads, strict=True):
            with tf.device(device):
                buffers = pack(dense_of(row), groups)
            rows.append([*buffers, *sparse_of(row)])
        results: list[list[Gradient]] = []
        for device, row in zip(
            devices, self._reduction(rows, devices), strict=True
        ):
            with tf.device(device):
                # No buffer contains empty tensors, which are the same
                # everywhere.
                shaped = [
                    tf.zeros(grad.shape, grad.dtype)
                    if grad.shape.num_elements() == 0
                    else grad
                    for grad in first
                ]
                tensors = unpack(dense_of(row), groups, shaped)
                results.append(in_order(like, tensors, sparse_of(row)))
        return results
