"""Packs the tensors that towers exchange into a few buffers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction.collectives import Collectives, Tensors, on_each
from keras_towers.reduction.gradients import Gradient, Gradients, check_towers
from keras_towers.transport import messages
from keras_towers.transport.devices import as_whole_number
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
    device. IndexedSlices, and rows whose numbers are unknown before a step,
    pass unchanged.

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
        dense = {
            i: grad
            for i, grad in enumerate(grads[0])
            if isinstance(grad, tf.Tensor)
        }
        return self._exchange(
            self.collectives.all_reduce,
            grads,
            devices,
            self._groups(dense, len(grads[0])),
            messages.joined_group,
            messages.divided_as(dense),
        )

    def broadcast(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        known = dict(enumerate(tensors))
        return self._exchange(
            lambda rows, to: self.collectives.broadcast(rows[0], to),
            [tensors],
            devices,
            self._groups(known, len(tensors)),
            messages.joined_group,
            messages.divided_as(known),
        )

    def reduce_scatter(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        shapes = [tensor.shape for tensor in tensors[0]]
        groups = self._groups_of_rows(tensors[0], shapes, rows)

        def pack(own: Sequence[tf.Tensor], group: Sequence[int]) -> tf.Tensor:
            wholes, own_rows = _all_of(group, own, rows)
            vector, _ = messages.joined_rows(wholes, own_rows)
            return vector

        def unpack(
            part: tf.Tensor, group: Sequence[int], k: int
        ) -> list[tf.Tensor]:
            of_device = [rows[i].shapes(shapes[i])[k] for i in group]
            return messages.divided(part, of_device)

        scatter = functools.partial(
            self.collectives.reduce_scatter,
            rows=_rows_of_buffers(groups, shapes, rows),
        )
        return self._exchange(scatter, tensors, devices, groups, pack, unpack)

    def all_gather(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        shapes = [
            own.whole_shape(tensor.shape)
            for own, tensor in zip(rows, tensors[0], strict=True)
        ]
        groups = self._groups_of_rows(tensors[0], shapes, rows)

        def unpack(
            whole: tf.Tensor, group: Sequence[int], **_: int
        ) -> list[tf.Tensor]:
            of_group, own_rows = _all_of(group, shapes, rows)
            return messages.wholes_of(whole, of_group, own_rows)

        gather = functools.partial(
            self.collectives.all_gather,
            rows=_rows_of_buffers(groups, shapes, rows),
        )
        return self._exchange(
            gather, tensors, devices, groups, messages.joined_group, unpack
        )

    def _exchange(
        self,
        exchange: Callable[..., list[list[Any]]],
        tensors: Gradients,
        devices: Sequence[str],
        groups: Sequence[Sequence[int]],
        pack: Callable[[Sequence[Any], Sequence[int]], tf.Tensor],
        unpack: Callable[..., list[tf.Tensor]],
    ) -> list[list[Any]]:
        """Exchange the buffers of groups; a single tensor is not copied.

        Args:
            exchange: exchanges buffers.
            tensors: what each device has, or what one has for all.
            devices: the devices.
            groups: the indices of the tensors of each buffer.
            pack: makes a buffer of what a device has for a group.
            unpack: undoes that, given a buffer, its group, and as ``k`` which
                device.
        """
        if len(devices) == 1:
            return list(map(list, tensors))

        def packed(own: Sequence[Any]) -> list[Any]:
            return messages.pack(own, groups, pack)

        def unpacked(own: Sequence[Any], k: int) -> list[Any]:
            divide = functools.partial(unpack, k=k)
            return messages.unpack(own, groups, tensors[0], divide)

        buffers = on_each(devices[: len(tensors)], packed, tensors)
        exchanged = exchange(buffers, devices)
        return on_each(devices, unpacked, exchanged, range(len(devices)))

    def _groups(
        self, specs: Mapping[int, tf.Tensor | tf.TensorSpec], number: int
    ) -> list[list[int]]:
        """Return the indices of the tensors of each buffer.

        Args:
            specs: the tensors that may be packed, by their indices.
            number: the number of all tensors.
        """
        known = list(specs)
        packed = self._packer.groups(list(specs.values()))
        groups = [[known[i] for i in own] for own in packed]
        alone = set(range(number)).difference(*groups)
        return [*groups, *([i] for i in sorted(alone))]

    def _groups_of_rows(
        self,
        tensors: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape],
        rows: Sequence[Rows],
    ) -> list[list[int]]:
        """Return groups of tensors whose rows devices have, or get."""
        specs = {
            i: tf.TensorSpec(shapes[i], tensors[i].dtype)
            for i, own in enumerate(rows)
            if own.is_known
        }
        return self._groups(specs, len(rows))


def _all_of(group: Sequence[int], *lists: Sequence[Any]) -> list[list[Any]]:
    """Return the members of a group from each of some lists."""
    return [[values[i] for i in group] for values in lists]


def _rows_of_buffers(
    groups: Sequence[Sequence[int]],
    shapes: Sequence[tf.TensorShape],
    rows: Sequence[Rows],
) -> list[Rows]:
    """Return the devices' rows of buffers, or of a single tensor."""
    all_rows = []
    for group in groups:
        own_shapes, own_rows = _all_of(group, shapes, rows)
        if len(group) == 1:
            all_rows += own_rows
        else:
            sizes = messages.elements_of_members(own_shapes, own_rows)
            all_rows.append(Rows(0, sizes))
    return all_rows
