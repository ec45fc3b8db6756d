"""Many small gradients packed into a few large buffers, and back."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction.communication_hooks import Decode, Link
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
        """Plan for these dtypes and shapes; None if nothing is to be packed."""
        key = tuple((grad.dtype, _static(grad.shape)) for grad in grads)
        if key not in self._plans:
            self._plans[key] = self._make_plan(grads)
        return self._plans[key]

    def _make_plan(self, grads: Sequence[tf.Tensor]) -> PackingPlan | None:
        groups: list[_Group] = []
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            members = []
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
                    members.append(index)
            shapes = [grads[index].shape for index in members]
            total = sum(shape.num_elements() for shape in shapes)
            count = self._buffers(total * dtype.size)
            if total >= count * self.min_elements:
                groups.append(_make_group(members, shapes, count))
            elif members:
                logger.debug(
                    "not packed: %d gradients of %s, because %d elements are "
                    "fewer than %d in each of %d buffers",
                    len(members),
                    dtype.name,
                    total,
                    self.min_elements,
                    count,
                )
        if not groups:
            return None
        packed = {index for group in groups for index in group.members}
        alone = tuple(i for i in range(len(grads)) if i not in packed)
        return PackingPlan(tuple(groups), alone)

    def _buffers(self, size: int) -> int:
        if self.split_bytes is None:
            return self.num_split
        return max(1, -(-size // self.split_bytes))


@dataclasses.dataclass(frozen=True)
class _Group:
    """The gradients of one dtype, as one sequence cut into pieces."""

    members: tuple[int, ...]
    shapes: tuple[tf.TensorShape, ...]
    by_gradient: tuple[tuple[int, ...], ...]
    by_buffer: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """How N gradients become buffers; see ``GradientPacker.plan``."""

    groups: tuple[_Group, ...]
    alone: tuple[int, ...]

    def pack(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return one-dimensional buffers, then what is not packed."""
        buffers: list[tf.Tensor] = []
        for group in self.groups:
            flat = [tf.reshape(grads[index], [-1]) for index in group.members]
            buffers += _recut(flat, group.by_gradient, group.by_buffer)
        return buffers + [grads[index] for index in self.alone]

    def unpack(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return N gradients from what ``pack`` returned, or sums of that."""
        rest = iter(buffers)
        grads: dict[int, tf.Tensor] = {}
        for group in self.groups:
            mine = list(itertools.islice(rest, len(group.by_buffer)))
            flat = _recut(mine, group.by_buffer, group.by_gradient)
            for index, shape, tensor in zip(
                group.members, group.shapes, flat, strict=True
            ):
                grads[index] = tf.reshape(tensor, shape)
        grads.update(zip(self.alone, rest, strict=True))
        return [grads[index] for index in range(len(grads))]


def pack(packer: GradientPacker) -> Link:
    """Sum a few buffers instead of many gradients."""

    def link(
        tensors: Sequence[tf.Tensor], key: str
    ) -> tuple[list[tf.Tensor], Decode]:
        plan = packer.plan(tensors)
        if plan is None:
            return list(tensors), list
        return plan.pack(tensors), plan.unpack

    return link


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


def _make_group(
    members: Sequence[int], shapes: Sequence[tf.TensorShape], count: int
) -> _Group:
    ends = list(itertools.accumulate(s.num_elements() for s in shapes))
    bounds = [ends[-1] * (part + 1) // count for part in range(count)]
    cuts = sorted({0, *ends, *bounds})
    return _Group(
        tuple(members),
        tuple(shapes),
        _pieces(cuts, ends),
        _pieces(cuts, bounds),
    )


def _pieces(
    cuts: Sequence[int], ends: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The lengths between cuts, for each part that ends at ``ends``."""
    pieces = []
    for start, end in itertools.pairwise([0, *ends]):
        inside = [cut for cut in cuts if start <= cut <= end]
        pieces.append(tuple(b - a for a, b in itertools.pairwise(inside)))
    return tuple(pieces)


def _recut(
    tensors: Sequence[tf.Tensor],
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
) -> list[tf.Tensor]:
    """Cut a sequence of tensors in different places.

    The order of the pieces does not change, so each element is copied about
    once; concatenating everything and splitting it again would copy it twice.
    """
    pieces = itertools.chain.from_iterable(
        tf.split(tensor, lengths) if len(lengths) > 1 else [tensor]
        for tensor, lengths in zip(tensors, before, strict=True)
    )
    joined = []
    for lengths in after:
        parts = list(itertools.islice(pieces, len(lengths)))
        joined.append(tf.concat(parts, axis=0) if len(parts) > 1 else parts[0])
    return joined
