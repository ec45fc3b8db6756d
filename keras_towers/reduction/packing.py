"""Packing of what towers exchange into a few buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.devices import as_whole_number
from keras_towers.errors import TowerError
from keras_towers.reduction.collectives import Collectives, Tensors
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    check_towers,
    dense_of,
    in_order,
    sparse_of,
)
from keras_towers.transport import messages
from keras_towers.transport.messages import Rows, group_by_bytes


@dataclasses.dataclass(frozen=True)
class GradientPacker:
    """Decides how gradients are packed into buffers.

    Each reduction of a buffer costs a launch and a round of messages. A few
    buffers keep this overhead low, and still let towers reduce one buffer while
    they compute gradients for others. The packer never divides a gradient: if a
    gradient is larger than a buffer, towers reduce it alone. Tensorpack's
    ``GradientPacker`` needs a single dtype and known shapes. Here, each dtype
    has separate buffers, and towers reduce gradients of unknown shapes alone.

    Args:
        num_split: the approximate number of buffers for each dtype.
        min_elements: the smallest number of elements in a buffer. If gradients
            are few or small, they need fewer buffers than ``num_split``.

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

    def groups(
        self, grads: Sequence[tf.Tensor | tf.TensorSpec]
    ) -> list[list[int]]:
        """Return the indices of the gradients of each buffer."""
        groups = []
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            indices = [i for i, g in enumerate(grads) if g.dtype == dtype]
            of_dtype = [grads[i] for i in indices]
            total = sum(g.shape.num_elements() or 0 for g in of_dtype)
            elements = max(self.min_elements, -(-total // self.num_split))
            for group in reversed(
                group_by_bytes(of_dtype, elements * dtype.size)
            ):
                groups.append([indices[i] for i in group])
        return groups


class Packed(Collectives):
    """Exchanges packed tensors, with the same results.

    Each device packs and unpacks its own tensors, with the shapes of the first
    device. IndexedSlices, and rows of which the numbers are not known before a
    step, are passed on unchanged.

    Args:
        collectives: exchange K lists of buffers.
        packer: decides which tensors share a buffer.

    Example:
        >>> packed = Packed(Hierarchical(), GradientPacker())
    """

    def __init__(self, collectives: Collectives, packer: GradientPacker):
        self.collectives = collectives
        self._packer = packer

    def all_reduce(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        check_towers(grads, devices)
        if len(devices) == 1:
            return self.collectives.all_reduce(grads, devices)
        like = grads[0]
        first = dense_of(like)
        groups = self._packer.groups(first)
        rows: list[list[Gradient]] = []
        for device, row in zip(devices, grads, strict=True):
            with tf.device(device):
                buffers = messages.pack(dense_of(row), groups)
            rows.append([*buffers, *sparse_of(row)])
        sums = self.collectives.all_reduce(rows, devices)
        results: list[list[Gradient]] = []
        for device, row in zip(devices, sums, strict=True):
            with tf.device(device):
                tensors = messages.unpack(
                    dense_of(row), groups, _without_empty(first)
                )
            results.append(in_order(like, tensors, sparse_of(row)))
        return results

    def broadcast(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        if len(devices) == 1:
            return [list(tensors)]
        groups = self._packer.groups(tensors)
        copies = self.collectives.broadcast(
            messages.pack(tensors, groups), devices
        )
        results = []
        for device, row in zip(devices, copies, strict=True):
            with tf.device(device):
                results.append(
                    messages.unpack(row, groups, _without_empty(tensors))
                )
        return results

    def reduce_scatter(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        if len(devices) == 1:
            return list(map(list, tensors))
        shapes = [tensor.shape for tensor in tensors[0]]
        groups = self._groups(tensors[0], shapes, rows)

        def pack(own: Sequence[tf.Tensor], group: Sequence[int]) -> tf.Tensor:
            wholes, own_rows = _all_of(group, own, rows)
            vector, _ = messages.joined_rows(wholes, own_rows)
            return vector

        def unpack(
            part: tf.Tensor, group: Sequence[int], k: int
        ) -> list[tf.Tensor]:
            of_device = [rows[i].shapes(shapes[i])[k] for i in group]
            return messages.divided(part, of_device)

        parts = self.collectives.reduce_scatter(
            _packed(tensors, devices, groups, pack),
            devices,
            _rows_of_buffers(groups, shapes, rows),
        )
        return _unpacked(parts, devices, groups, unpack)

    def all_gather(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        if len(devices) == 1:
            return list(map(list, tensors))
        shapes = [
            own.whole_shape(tensor.shape)
            for own, tensor in zip(rows, tensors[0], strict=True)
        ]
        groups = self._groups(tensors[0], shapes, rows)

        def pack(own: Sequence[tf.Tensor], group: Sequence[int]) -> tf.Tensor:
            return messages.joined(own[i] for i in group)

        def unpack(
            whole: tf.Tensor, group: Sequence[int], _: int
        ) -> list[tf.Tensor]:
            of_group, own_rows = _all_of(group, shapes, rows)
            return messages.wholes_of(whole, of_group, own_rows)

        wholes = self.collectives.all_gather(
            _packed(tensors, devices, groups, pack),
            devices,
            _rows_of_buffers(groups, shapes, rows),
        )
        return _unpacked(wholes, devices, groups, unpack)

    def _groups(
        self,
        tensors: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape],
        rows: Sequence[Rows],
    ) -> list[list[int]]:
        """Return the indices of the tensors of each buffer, or of one alone.

        Args:
            tensors: what a device has of N tensors.
            shapes: the shapes of the wholes.
            rows: for each of them, the rows of the devices.
        """
        known = [
            i
            for i, own in enumerate(rows)
            if own.is_known and shapes[i].num_elements()
        ]
        specs = [tf.TensorSpec(shapes[i], tensors[i].dtype) for i in known]
        groups = [[known[i] for i in own] for own in self._packer.groups(specs)]
        return groups + [[i] for i, _ in enumerate(rows) if i not in known]


def _all_of(group: Sequence[int], *lists: Sequence[Any]) -> list[list[Any]]:
    """Return the members of a group in each of some lists."""
    return [[values[i] for i in group] for values in lists]


def _rows_of_buffers(
    groups: Sequence[Sequence[int]],
    shapes: Sequence[tf.TensorShape],
    rows: Sequence[Rows],
) -> list[Rows]:
    """Return the rows that the devices have of buffers, or of one tensor."""
    found = []
    for group in groups:
        own_shapes, own_rows = _all_of(group, shapes, rows)
        if len(group) == 1:
            found += own_rows
        else:
            sizes = messages.elements_of_members(own_shapes, own_rows)
            found.append(Rows(0, sizes))
    return found


def _packed(
    tensors: Tensors,
    devices: Sequence[str],
    groups: Sequence[Sequence[int]],
    pack: Callable[[Sequence[tf.Tensor], Sequence[int]], tf.Tensor],
) -> list[list[tf.Tensor]]:
    """Return the buffers of each device; a tensor alone is not copied."""
    buffers = []
    for device, own in zip(devices, tensors, strict=True):
        with tf.device(device):
            buffers.append(
                [
                    own[group[0]] if len(group) == 1 else pack(own, group)
                    for group in groups
                ]
            )
    return buffers


def _unpacked(
    buffers: Tensors,
    devices: Sequence[str],
    groups: Sequence[Sequence[int]],
    unpack: Callable[[tf.Tensor, Sequence[int], int], list[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    """Return the tensors of each device, in their order."""
    results = []
    for k, (device, own) in enumerate(zip(devices, buffers, strict=True)):
        found: dict[int, tf.Tensor] = {}
        with tf.device(device):
            for group, buffer in zip(groups, own, strict=True):
                tensors = [buffer]
                if len(group) > 1:
                    tensors = unpack(buffer, group, k)
                found.update(zip(group, tensors, strict=True))
        results.append([found[i] for i in sorted(found)])
    return results


def _without_empty(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors, of which no empty one is that of a device.

    No buffer contains them, as they are the same everywhere.
    """
    return [
        tf.zeros(tensor.shape, tensor.dtype)
        if tensor.shape.num_elements() == 0
        else tensor
        for tensor in tensors
    ]
