"""Exchanges among the devices of a process: the protocol, and additions.

``collective_ops.py`` has NCCL and TensorFlow's collectives; ``packing.py``
packs tensors for any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    check_sums,
    check_towers,
    is_sparse,
)
from keras_towers.transport.devices import host_of
from keras_towers.transport.messages import Rows

_T = TypeVar("_T")

Tensors: TypeAlias = Sequence[Sequence[tf.Tensor]]
"""K lists of N dense tensors: one list per device."""

Reduction: TypeAlias = Callable[
    [Gradients, Sequence[str]], list[list[Gradient]]
]
"""Turns K lists of N gradients and K device names into K lists of N sums."""


@runtime_checkable
class Collectives(Protocol):
    """Exchanges tensors among the K devices of a process.

    A mode is one of these. ``Transport`` has the same methods for processes,
    each of which has one list of tensors. All methods take the names of the K
    devices. They return K lists of N tensors, each on its device, and work
    eagerly and inside a ``tf.function``.
    """

    def all_reduce(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        """Sum each of N tensors over the devices, with the same bits on all.

        Args:
            grads: K lists of N tensors, or slices of rows.
            devices: the K devices.

        Raises:
            TowerError: the devices' tensors differ in shape or dtype.
        """
        ...

    def reduce_scatter(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        """Sum each of N tensors; each device gets its rows of the sum.

        Args:
            tensors: K lists of N tensors.
            devices: the K devices.
            rows: for each of the N tensors, which rows the devices get.
        """
        ...

    def all_gather(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        """Concatenate the rows of all devices, for each of N tensors.

        Args:
            tensors: K lists of N tensors: each device's rows.
            devices: the K devices.
            rows: for each of the N tensors, which rows the devices have.
        """
        ...

    def broadcast(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        """Copy N tensors of one device to all K devices."""
        ...


@dataclasses.dataclass(frozen=True)
class Column:
    """One of N tensors: K values, one on each device.

    Attributes:
        index: its number.
        tensors: the tensor of each device.
        devices: the devices.
        rows: the rows that each device has of a whole, or gets of it.
    """

    index: int
    tensors: Sequence[Any]
    devices: Sequence[str]
    rows: Rows

    def on_each(
        self, function: Callable[..., _T], *more: Sequence[Any]
    ) -> list[_T]:
        """Call a function of each device's tensor, on that device."""
        return on_each(self.devices, function, self.tensors, *more)

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> Column:
        """Return a column with other tensors."""
        return dataclasses.replace(self, tensors=tensors)


class OnTowers(Collectives):
    """Sums each tensor on one tower, and copies it to the others.

    Tower i mod K sums tensor i, which spreads the work and the traffic. A tower
    that gets rows sums or concatenates them itself. Ports mode "gpu" of
    tensorpack's ``SyncMultiGPUTrainerReplicated``, which divides the variables
    among the GPUs in the same way.

    Other modes inherit from this one, and override some methods.
    """

    def all_reduce(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        check_towers(grads, devices)
        return _for_each(self._reduce, grads, devices)

    def reduce_scatter(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        return _for_each(self._scatter, tensors, devices, rows)

    def all_gather(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        return _for_each(self._gather, tensors, devices, rows)

    def broadcast(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        return [[copy_to(device, t) for t in tensors] for device in devices]

    def _place(self, number: int, devices: Sequence[str]) -> str:
        """Return the device that computes a tensor, or a tower's rows."""
        return devices[number % len(devices)]

    def _reduce(self, column: Column) -> Sequence[Gradient]:
        if is_sparse(column.tensors[0]):
            place = self._place(column.index, column.devices)
            return _concat_slices(column.tensors, place, column.devices)
        return self._sum(column)

    def _sum(self, column: Column) -> Sequence[tf.Tensor]:
        """Sum a tensor of each device; return the sum for each."""
        place = self._place(column.index, column.devices)
        total = add_on(place, column.tensors)
        return [copy_to(device, total) for device in column.devices]

    def _scatter(self, column: Column) -> Sequence[tf.Tensor]:
        """Sum a tensor of each device; return the rows for each."""
        devices = column.devices
        parts = column.on_each(column.rows.split)
        return [
            copy_to(devices[tower], add_on(self._place(tower, devices), terms))
            for tower, terms in enumerate(zip(*parts, strict=True))
        ]

    def _gather(self, column: Column) -> Sequence[tf.Tensor]:
        """Concatenate a tensor of each device; return the whole for each."""
        devices = column.devices
        places = [self._place(k, devices) for k, _ in enumerate(devices)]
        wholes = {
            place: _concat_on(place, column.tensors, column.rows.axis)
            for place in dict.fromkeys(places)
        }
        return [
            copy_to(device, wholes[place])
            for device, place in zip(devices, places, strict=True)
        ]


class OnDevice(OnTowers):
    """Sums and gathers on one device.

    On the CPU, this is best if GPUs cannot access each other directly. Ports
    mode "cpu" of tensorpack's ``SyncMultiGPUTrainerReplicated``.

    Args:
        device: the device; None: the first CPU of the towers' machine.

    Example:
        >>> devices = ["/device:GPU:0", "/device:GPU:1"]
        >>> on_host = OnDevice()
        >>> sums = on_host.all_reduce([[tf.ones([2])], [tf.ones([2])]], devices)
        >>> sums[1][0].numpy()
        array([2., 2.], dtype=float32)
    """

    def __init__(self, device: str | None = None):
        self._device = device

    def _place(self, number: int, devices: Sequence[str]) -> str:
        return self._device or host_of(devices[0])


class Hierarchical(OnTowers):
    """Sums within two groups of devices, then across them.

    Only the main devices of the groups communicate across groups: on a DGX-1, a
    group is four GPUs with direct links to each other. The main devices rotate
    from tensor to tensor, so that all links between the groups are used. Rows
    are exchanged as ``OnTowers`` does. Ports mode "hierarchical" of
    tensorpack's ``SyncMultiGPUTrainerReplicated``, which supports only eight
    GPUs.
    """

    def _sum(self, column: Column) -> Sequence[tf.Tensor]:
        half = len(column.devices) // 2
        groups = column.devices[:half], column.devices[half:]
        terms = column.tensors[:half], column.tensors[half:]
        # The number of devices may be odd.
        mains = [group[column.index % len(group)] for group in groups]
        inside = list(map(add_on, mains, terms))
        totals = [add_on(main, inside) for main in mains]
        return [
            copy_to(device, total)
            for group, total in zip(groups, totals, strict=True)
            for device in group
        ]


class SumsByFunction(OnTowers):
    """Sums by a function; other exchanges are among the towers.

    Args:
        reduction: the function.
        source: names it in messages.

    Raises:
        TowerError: when it returns what cannot be the sums of gradients.
    """

    def __init__(self, reduction: Reduction, source: str):
        self._reduction = reduction
        self._source = f"the reduction {source}"

    def all_reduce(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        sums: Any = self._reduction(grads, devices)
        if not isinstance(sums, (list, tuple)) or len(sums) != len(grads):
            raise TowerError(
                f"{self._source} must return {len(grads)} lists of sums, one "
                f"for each tower, not {sums!r}."
            )
        for own, gradients in zip(sums, grads, strict=True):
            check_sums(own, gradients, self._source)
        return [list(own) for own in sums]

    def reduce_scatter(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        towers = range(len(devices))
        return on_each(
            devices,
            lambda tower, own: [p[tower] for p in map(Rows.split, rows, own)],
            towers,
            self.all_reduce(tensors, devices),
        )


def on_each(
    devices: Sequence[str], function: Callable[..., _T], *values: Sequence[Any]
) -> list[_T]:
    """Call a function of each device's values in some lists, on that device."""
    results = []
    for device, *own in zip(devices, *values, strict=True):
        with tf.device(device):
            results.append(function(*own))
    return results


def add_on(device: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sum tensors of equal shape and dtype on one device."""
    with tf.device(device):
        return tf.add_n(list(tensors))


def copy_to(device: str, tensor: tf.Tensor) -> tf.Tensor:
    """Copy a tensor to a device; no copy if it is already there."""
    with tf.device(device):
        return tf.identity(tensor)


def _concat_on(
    device: str, tensors: Sequence[tf.Tensor], axis: int
) -> tf.Tensor:
    with tf.device(device):
        return tf.concat(list(tensors), axis)


def _concat_slices(
    slices: Sequence[tf.IndexedSlices], main: str, devices: Sequence[str]
) -> list[tf.IndexedSlices]:
    """Concatenate the slices of K towers on one device; copy them to all.

    A row may occur several times, for example if a variable is gathered from
    twice; optimizers add such rows up.
    """
    values = _concat_on(main, [part.values for part in slices], 0)
    indices = _concat_on(main, [part.indices for part in slices], 0)
    return [
        tf.IndexedSlices(
            copy_to(device, values),
            copy_to(device, indices),
            slices[0].dense_shape,
        )
        for device in devices
    ]


def _for_each(
    exchange: Callable[[Column], Sequence[Any]],
    tensors: Gradients,
    devices: Sequence[str],
    rows: Sequence[Rows] | None = None,
) -> list[list[Any]]:
    """Exchange N tensors of K devices, from the last to the first.

    The backward pass computes gradients in this order: if ops keep their order,
    exchanges can start before the backward pass ends. A single device exchanges
    nothing.
    """
    if len(tensors) == 1:
        return [list(tensors[0])]
    rows = rows or [Rows(0)] * len(tensors[0])
    columns = [
        Column(index, own, devices, rows[index])
        for index, own in enumerate(zip(*tensors, strict=True))
    ]
    results = [exchange(column) for column in reversed(columns)][::-1]
    return [[result[k] for result in results] for k, _ in enumerate(devices)]
