"""Sums by additions and copies: on the host, on towers, in two groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import tensorflow as tf

from keras_towers.devices import host_of
from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    check_towers,
    is_sparse,
)


def add_on(device: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sum tensors of equal shape and dtype on one device."""
    with tf.device(device):
        return tf.add_n(list(tensors))


def copy_to(device: str, tensor: tf.Tensor) -> tf.Tensor:
    """Copy a tensor to a device; no copy if it is already there."""
    with tf.device(device):
        return tf.identity(tensor)


def sum_slices(
    slices: Sequence[tf.IndexedSlices], main: str, devices: Sequence[str]
) -> list[tf.IndexedSlices]:
    """Concatenate the slices of K towers on one device; copy them to all.

    A row may occur several times, and optimizers add repeated rows up, as where
    a variable is gathered from twice.
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
            columns.append(sum_slices(column, sparse_on(index), devices))
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
    """Sum gradient i of all towers on place i, only there; return N sums.

    Ports tensorpack's ``SyncMultiGPUParameterServerBuilder``.
    """
    check_towers(grads, devices)
    if len(grads) == 1:
        return list(grads[0])
    return [
        sum_slices(column, place, [place])[0]
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

    Raises:
        TowerError: an odd number of towers, or gradients that do not match.
    """
    towers = len(devices)
    if towers > 1 and towers % 2:
        raise TowerError(
            "The hierarchical all-reduce needs an even number of towers, in "
            f"two equal groups; there are {towers}. Use one more, one less, "
            "or another mode."
        )
    half = towers // 2

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
    """Sum by operations that wait for one another, one on each tower.

    Others are summed on the towers in turn: slices, tensors of other dtypes,
    and those whose shapes are empty or unknown at tracing time. In eager code
    that applies to all gradients, because an operation would wait forever for
    peers that are launched after it.
    """
    if tf.executing_eagerly():
        return sum_on_towers(grads, devices)

    def dense(index: int, tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        known = all(tensor.shape.num_elements() for tensor in tensors)
        if tensors[0].dtype in dtypes and known:
            return operation(tensors)
        total = add_on(devices[index % len(devices)], tensors)
        return [copy_to(device, total) for device in devices]

    return reduce_each(grads, devices, dense)
