"""Many small gradients packed into a few large buffers, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_towers.devices import as_whole_number
from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    Reduction,
    check_towers,
    dense_of,
    in_order,
    sparse_of,
)
from keras_towers.transport.messages import buckets, pack, unpack


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


def packed(reduction: Reduction, packer: GradientPacker) -> Reduction:
    """Apply a reduction to packed gradients, with the same sums.

    Each tower packs and unpacks on its own device, with tower 0's shapes.
    IndexedSlices are passed to the reduction unchanged.

    Example:
        >>> reduce = packed(hierarchical_all_reduce, GradientPacker())
    """

    def reduce(
        grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        check_towers(grads, devices)
        if len(grads) == 1:
            return reduction(grads, devices)
        first = dense_of(grads[0])
        groups = packer.groups(first)
        rows: list[list[Gradient]] = []
        for device, row in zip(devices, grads, strict=True):
            with tf.device(device):
                buffers = pack(dense_of(row), groups)
            rows.append([*buffers, *sparse_of(row)])
        results = []
        for device, like, row in zip(
            devices, grads, reduction(rows, devices), strict=True
        ):
            with tf.device(device):
                # No buffer contains empty tensors.
                own = [
                    tf.ensure_shape(grad, known.shape)
                    for grad, known in zip(dense_of(like), first, strict=True)
                ]
                tensors = unpack(dense_of(row), groups, own)
            results.append(in_order(like, tensors, sparse_of(row)))
        return results

    return reduce
