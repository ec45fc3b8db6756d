"""Exchanges among the devices of a process: the protocol, and additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import tensorflow as tf

from keras_towers.devices import host_of
from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    check_sums,
    check_towers,
    dense_of,
    sparse_of,
)
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
        """Sum each of N tensors over the devices; they get the same bits.

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


class OnTowers(Collectives):
    """Adds up on the towers in turn, which copy from one another.

    Tower i mod K adds tensor i up, which spreads the work and the traffic. Rows
    are added up, and put together, by the tower that gets them. Ports mode
    "gpu" of tensorpack's ``SyncMultiGPUTrainerReplicated``, which divides the
    variables among the GPUs in the same way.

    Other modes inherit from this one, and replace what they do differently.
    """

    def all_reduce(
        self, grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        check_towers(grads, devices)

        def exchange(
            index: int, column: Sequence[Gradient]
        ) -> Sequence[Gradient]:
            if slices := sparse_of(column):
                place = self._place(index, devices)
                return _concat_slices(slices, place, devices)
            return self._sum(index, dense_of(column), devices)

        return _for_each(grads, exchange)

    def reduce_scatter(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        return _for_each(
            tensors,
            lambda index, column: self._scatter(
                index, column, devices, rows[index]
            ),
        )

    def all_gather(
        self, tensors: Tensors, devices: Sequence[str], rows: Sequence[Rows]
    ) -> list[list[tf.Tensor]]:
        return _for_each(
            tensors,
            lambda index, column: self._gather(
                index, column, devices, rows[index]
            ),
        )

    def broadcast(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        if len(devices) == 1:
            return [list(tensors)]
        columns = [self._copy(tensor, devices) for tensor in tensors]
        return [
            [column[k] for column in columns] for k, _ in enumerate(devices)
        ]

    def _place(self, index: int, devices: Sequence[str]) -> str:
        """Return where tensor ``index`` is added up for all."""
        return devices[index % len(devices)]

    def _place_of(self, tower: int, devices: Sequence[str]) -> str:
        """Return where what a tower alone gets is put together."""
        return devices[tower]

    def _sum(
        self, index: int, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> Sequence[tf.Tensor]:
        """Sum a tensor of each device; return the sum for each."""
        total = add_on(self._place(index, devices), tensors)
        return [copy_to(device, total) for device in devices]

    def _scatter(
        self,
        index: int,
        tensors: Sequence[tf.Tensor],
        devices: Sequence[str],
        rows: Rows,
    ) -> Sequence[tf.Tensor]:
        """Sum a tensor of each device; return the rows for each."""
        return [
            copy_to(device, add_on(self._place_of(tower, devices), terms))
            for tower, (device, terms) in enumerate(
                zip(devices, _terms(tensors, devices, rows), strict=True)
            )
        ]

    def _gather(
        self,
        index: int,
        tensors: Sequence[tf.Tensor],
        devices: Sequence[str],
        rows: Rows,
    ) -> Sequence[tf.Tensor]:
        """Concatenate a tensor of each device; return the whole for each."""
        places = [self._place_of(k, devices) for k, _ in enumerate(devices)]
        wholes = {
            place: _concat_on(place, tensors, rows.axis)
            for place in dict.fromkeys(places)
        }
        return [
            copy_to(device, wholes[place])
            for device, place in zip(devices, places, strict=True)
        ]

    def _copy(
        self, tensor: tf.Tensor, devices: Sequence[str]
    ) -> Sequence[tf.Tensor]:
        """Return a tensor for each device."""
        return [copy_to(device, tensor) for device in devices]


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

    def _place(self, index: int, devices: Sequence[str]) -> str:
        return self._device or host_of(devices[0])

    def _place_of(self, tower: int, devices: Sequence[str]) -> str:
        return self._device or host_of(devices[0])


class Hierarchical(OnTowers):
    """Adds up within two groups, then across them.

    Only the main devices of the groups communicate across groups: on a DGX-1, a
    group is four GPUs with direct links to each other. The main devices rotate
    from tensor to tensor, so that all links between the groups are used. What
    one device alone gets crosses between it and one device of the other group.
    Ports mode "hierarchical" of tensorpack's ``SyncMultiGPUTrainerReplicated``,
    which supports only eight GPUs.
    """

    def _sum(
        self, index: int, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> Sequence[tf.Tensor]:
        groups, mains = _in_two(devices), _mains(index, devices)
        inside = [
            add_on(main, own)
            for main, own in zip(mains, _in_two(tensors), strict=True)
        ]
        totals = [add_on(main, inside) for main in mains]
        return _copies_in(groups, totals)

    def _scatter(
        self,
        index: int,
        tensors: Sequence[tf.Tensor],
        devices: Sequence[str],
        rows: Rows,
    ) -> Sequence[tf.Tensor]:
        first, second = _in_two(devices)
        results = []
        for tower, terms in enumerate(_terms(tensors, devices, rows)):
            own, other = _in_two(terms)
            others = second
            if tower >= len(first):
                own, other, others = other, own, first
            across = add_on(others[tower % len(others)], other)
            results.append(add_on(devices[tower], [*own, across]))
        return results

    def _gather(
        self,
        index: int,
        tensors: Sequence[tf.Tensor],
        devices: Sequence[str],
        rows: Rows,
    ) -> Sequence[tf.Tensor]:
        mains = _mains(index, devices)
        wholes = [_concat_on(main, tensors, rows.axis) for main in mains]
        return _copies_in(_in_two(devices), wholes)

    def _copy(
        self, tensor: tf.Tensor, devices: Sequence[str]
    ) -> Sequence[tf.Tensor]:
        mains = _mains(0, devices)
        at_mains = [copy_to(main, tensor) for main in mains]
        return _copies_in(_in_two(devices), at_mains)


class SumsByFunction(OnTowers):
    """Sums by a function; what is not a sum is exchanged among the towers.

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
        sums: Any = self.all_reduce(tensors, devices)
        results = []
        for tower, (device, own) in enumerate(zip(devices, sums, strict=True)):
            with tf.device(device):
                parts = map(Rows.split, rows, own)
                results.append([part[tower] for part in parts])
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


def _terms(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], rows: Rows
) -> list[Sequence[tf.Tensor]]:
    """Return for each device that gets rows what the devices have of them."""
    parts = []
    for device, tensor in zip(devices, tensors, strict=True):
        with tf.device(device):
            parts.append(rows.split(tensor))
    return list(zip(*parts, strict=True))


def _in_two(values: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
    """Divide what K devices have into two groups."""
    half = len(values) // 2
    return values[:half], values[half:]


def _mains(index: int, devices: Sequence[str]) -> list[str]:
    """Return the device of each group that communicates for tensor ``index``.

    The number of devices may be odd.
    """
    return [group[index % len(group)] for group in _in_two(devices)]


def _copies_in(
    groups: Sequence[Sequence[str]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Copy the tensor of each group to its devices."""
    return [
        copy_to(device, tensor)
        for group, tensor in zip(groups, tensors, strict=True)
        for device in group
    ]


def _for_each(
    rows: Sequence[Sequence[_T]],
    exchange: Callable[[int, Sequence[_T]], Sequence[_T]],
) -> list[list[_T]]:
    """Exchange N tensors of K devices, from the last to the first.

    The backward pass computes gradients in this order: where ops keep their
    order, exchanges can then start before the backward pass ends. One device
    exchanges nothing.
    """
    if len(rows) == 1:
        return [list(rows[0])]
    columns = list(enumerate(zip(*rows, strict=True)))
    results = [exchange(*column) for column in reversed(columns)][::-1]
    return [[result[k] for result in results] for k, _ in enumerate(rows)]
