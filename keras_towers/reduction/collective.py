"""TensorFlow's collective ops: a ring between the towers, or NCCL."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import Gradient, Gradients
from keras_towers.reduction.naive import sum_on_towers
from keras_towers.reduction.nccl import nccl_available
from keras_towers.reduction.per_gradient import reduce_each
from keras_towers.reduction.placed import (
    add_on,
    copy_to,
    host_of,
    same_device,
    same_devices,
)

HINTS = ("ring", "nccl", "auto")

# What TensorFlow's kernels exist for.
_DTYPES = (
    tf.bfloat16,
    tf.float16,
    tf.float32,
    tf.float64,
    tf.int32,
    tf.int64,
)

# A group of devices is known to TensorFlow by its key, for the life of the
# process and with a fixed size. TensorFlow's own strategies count from 1.
_group_keys = itertools.count(1_000_000)

# TensorFlow knows each reduction by a key too, and remembers its dtype: a key
# belongs to one gradient in one graph. It has so many of them, to use in turn.
_SLOTS = 16


class CollectiveAllReduce:
    """Sums gradients by TensorFlow's collective ops.

    On the ring, every tower sends 2 (K-1)/K of its bytes, whatever K is (P.
    Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009). The source is mode "collective" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``.

    A step that fails on one tower ends with its error on all towers; the next
    step works again. All collectives of a graph run, also where nobody reads
    their results: a tower cannot leave its peers waiting.

    What the ops do not know is summed on the towers in turn: slices, some
    dtypes, shapes that are empty or not known when the graph is made. In eager
    code all gradients are: there, one op after the other is launched, and the
    first would wait for ever for the second.

    Args:
        devices: the names of K devices.
        hint: ``"ring"``, ``"nccl"`` (physical GPUs only) or ``"auto"``
            (TensorFlow picks). None: ``"nccl"`` where it can run, else
            ``"ring"``.

    Raises:
        TowerError: unknown hint, or a device that is named twice.

    Example:
        >>> reduce = CollectiveAllReduce(["/device:CPU:0", "/device:CPU:1"])
        >>> @tf.function
        ... def step(grads):
        ...     return reduce(grads, reduce.devices)
        >>> step([[tf.ones([2])], [tf.ones([2])]])[1][0].numpy()
        array([2., 2.], dtype=float32)
    """

    def __init__(self, devices: Sequence[str], hint: str | None = None):
        if hint is None:
            hint = "nccl" if nccl_available(devices)[0] else "ring"
        if hint not in HINTS:
            raise TowerError(
                f"hint={hint!r} is not known. Give one of "
                f"{', '.join(map(repr, HINTS))}, or None."
            )
        for one, other in itertools.combinations(devices, 2):
            if same_device(one, other):
                raise TowerError(
                    f"Collective ops need different devices, but {one} and "
                    f"{other} are one. Name each device once."
                )
        self.devices = tuple(devices)
        self.hint = hint
        self._host = host_of(devices[0])
        self._group_key = next(_group_keys)
        self._keys = itertools.count(0, _SLOTS)
        self._steps = _variable(self._host, tf.int64)
        # TensorFlow orders the stateful ops of a graph one after the other,
        # which collective peers do not survive, unless they are on different
        # resources: one for each device.
        self._orders = [_variable(device, tf.float32) for device in devices]

    def __call__(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        """Sum the gradients of the towers.

        Args:
            grads: K lists of N gradients.
            devices: the K devices that this object was made for.

        Returns:
            K lists of N sums.

        Raises:
            TowerError: other devices, or gradients that do not fit each other.
        """
        if not same_devices(devices, self.devices):
            raise TowerError(
                f"This reduction was made for {', '.join(self.devices)}, not "
                f"for {', '.join(devices)}. Make one for each set of devices."
            )
        if tf.executing_eagerly():
            return sum_on_towers(grads, devices)

        slot = self._next_slot()

        def dense(index: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            # On a tensor without elements, the ring crashes (TF 2.21); after
            # shapes that differ, no collective op of the process works.
            known = all(tensor.shape.num_elements() for tensor in tensors)
            if tensors[0].dtype not in _DTYPES or not known:
                total = add_on(devices[index % len(devices)], tensors)
                return [copy_to(device, total) for device in devices]
            return self._all_reduce(tensors, slot)

        return reduce_each(grads, devices, dense)

    def _all_reduce(
        self, tensors: Sequence[tf.Tensor], slot: tf.Tensor
    ) -> list[tf.Tensor]:
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
        """Count the steps, in the graph, in a small circle.

        With one key, two threads that run the same graph would take each
        other's buffers. With keys that never come back, TensorFlow would keep
        a kilobyte for each. This op counts atomically.
        """
        with tf.device(self._host):
            step = tf.raw_ops.ResourceCountUpTo(
                resource=self._steps.handle, limit=2**62, T=tf.int64
            )
            return tf.cast(step % _SLOTS, tf.int32)


def _variable(device: str, dtype: tf.DType) -> tf.Variable:
    # One plain variable on one device, also where a strategy, which would make
    # a mirrored one, or a graph is being entered.
    with tf.init_scope(), compat.single_device_mode(), tf.device(device):
        return tf.Variable(0, dtype=dtype, trainable=False)
