"""Many small gradients packed into a few large buffers, and back."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence

import tensorflow as tf

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

logger: logging.Logger = logging.getLogger("keras_towers")


class GradientPacker:
    """Decides how gradients are packed into buffers.

    Each reduction of a buffer costs a launch and a round of messages. A few
    buffers keep this overhead low, while several can still run concurrently.
    Ports tensorpack's ``GradientPacker`` (which needs a single dtype and known
    shapes, and makes eight buffers or none).

    Args:
        num_split: number of buffers per dtype; their sizes differ by at most
            one element.
        split_bytes: approximate size of a buffer in bytes; if given, it
            determines the number of buffers instead of ``num_split``.
        min_elements: gradients of a dtype are not packed if a buffer would
            have fewer elements than this.

    Raises:
        TowerError: a number of buffers, bytes or elements that is not positive.

    Example:
        >>> plan = GradientPacker(num_split=2, min_elements=1).plan(
        ...     [tf.zeros([2, 2]), tf.zeros([]), tf.zeros([3])]
        ... )
        >>> buffers = plan.pack([tf.zeros([2, 2]), tf.ones([]), tf.ones([3])])
        >>> [buffer.numpy().tolist() for buffer in buffers]
        [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
        >>> [tensor.shape.rank for tensor in plan.unpack(buffers)]
        [2, 0, 1]
    """

    def __init__(
        self,
        num_split: int = 8,
        split_bytes: int | None = None,
        min_elements: int = 1024,
    ):
        for name, value in (
            ("num_split", num_split),
            ("split_bytes", split_bytes),
            ("min_elements", min_elements),
        ):
            if value is not None and value < 1:
                raise TowerError(
                    f"{name}={value} is too small: give 1 or more."
                )
        self.num_split = num_split
        self.split_bytes = split_bytes
        self.min_elements = min_elements
        self._plans: dict[tuple, PackingPlan | None] = {}

    def plan(self, grads: Sequence[tf.Tensor]) -> PackingPlan | None:
        """Return a plan for these dtypes and shapes; None: nothing to pack."""
        key = tuple((grad.dtype, _static(grad.shape)) for grad in grads)
        if key not in self._plans:
            self._plans[key] = self._make_plan(grads)
        return self._plans[key]

    def _make_plan(self, grads: Sequence[tf.Tensor]) -> PackingPlan | None:
        buffers: list[list[Piece]] = []
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            sizes: dict[int, int] = {}
            for index, grad in enumerate(grads):
                if grad.dtype != dtype:
                    continue
                if not grad.shape.is_fully_defined():
                    logger.debug(
                        "not packed: gradient %d, because its shape %s is not "
                        "fully defined",
                        index,
                        grad.shape,
                    )
                elif grad.shape.num_elements():
                    sizes[index] = grad.shape.num_elements()
            total = sum(sizes.values())
            count = self._buffers(total * dtype.size)
            if total >= count * self.min_elements:
                buffers += _cut(sizes, count)
            elif sizes:
                logger.debug(
                    "not packed: %d gradients of %s, because %d elements are "
                    "fewer than %d in each of %d buffers",
                    len(sizes),
                    dtype.name,
                    total,
                    self.min_elements,
                    count,
                )
        if not buffers:
            return None
        packed = {piece.gradient for pieces in buffers for piece in pieces}
        return PackingPlan(
            buffers,
            {index: grads[index].shape for index in sorted(packed)},
            [index for index in range(len(grads)) if index not in packed],
        )

    def _buffers(self, size: int) -> int:
        if self.split_bytes is None:
            return self.num_split
        return max(1, -(-size // self.split_bytes))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of elements of a flattened gradient."""

    gradient: int
    start: int
    stop: int


def _cut(sizes: Mapping[int, int], count: int) -> list[list[Piece]]:
    """Cut gradients, one after another, into buffers of about equal size."""
    total = sum(sizes.values())
    bounds = [total * number // count for number in range(count + 1)]
    buffers = []
    for low, high in itertools.pairwise(bounds):
        pieces, offset = [], 0
        for index, size in sizes.items():
            start, stop = max(0, low - offset), min(size, high - offset)
            if start < stop:
                pieces.append(Piece(index, start, stop))
            offset += size
        buffers.append(pieces)
    return buffers


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """How N gradients become buffers; see ``GradientPacker.plan``.

    A buffer needs no other gradients than those in it, so that it can be
    reduced while the backward pass goes on.
    """

    buffers: list[list[Piece]]
    shapes: dict[int, tf.TensorShape]
    alone: list[int]

    def pack(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return flat buffers, followed by the gradients not packed."""
        flat = {i: tf.reshape(grads[i], [-1]) for i in self.shapes}
        packed = [
            _concat([flat[p.gradient][p.start : p.stop] for p in pieces])
            for pieces in self.buffers
        ]
        return packed + [grads[index] for index in self.alone]

    def unpack(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return N gradients from the buffers of ``pack``, or their sums."""
        parts: dict[int, list[tf.Tensor]] = {i: [] for i in self.shapes}
        count = len(self.buffers)
        for buffer, pieces in zip(buffers[:count], self.buffers, strict=True):
            lengths = [piece.stop - piece.start for piece in pieces]
            for piece, part in zip(
                pieces, tf.split(buffer, lengths), strict=True
            ):
                parts[piece.gradient].append(part)
        grads = dict(zip(self.alone, buffers[count:], strict=True))
        for index, shape in self.shapes.items():
            grads[index] = tf.reshape(_concat(parts[index]), shape)
        return [grads[index] for index in range(len(grads))]


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]


def packed(reduction: Reduction, packer: GradientPacker) -> Reduction:
    """Apply a reduction to packed gradients, with the same sums.

    Each tower packs and unpacks on its own device, as the shapes on tower 0
    say. IndexedSlices are passed to the reduction unchanged.

    Example:
        >>> reduce = packed(hierarchical_all_reduce, GradientPacker())
    """

    def reduce(
        grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        check_towers(grads, devices)
        plan = packer.plan(dense_of(grads[0]))
        if len(grads) == 1 or plan is None:
            return reduction(grads, devices)
        rows: list[list[Gradient]] = []
        for device, row in zip(devices, grads, strict=True):
            with tf.device(device):
                rows.append([*plan.pack(dense_of(row)), *sparse_of(row)])
        results = []
        for device, like, row in zip(
            devices, grads, reduction(rows, devices), strict=True
        ):
            with tf.device(device):
                tensors = plan.unpack(dense_of(row))
            results.append(in_order(like, tensors, sparse_of(row)))
        return results

    return reduce


def _static(shape: tf.TensorShape) -> tuple | None:
    return None if shape.rank is None else tuple(shape)
