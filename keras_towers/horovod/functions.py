"""Horovod's operations on tensors, Keras variables, arrays and numbers.

Their first argument may be any of these. They are differentiable where
Horovod's are, and take the options of ``horovod.tensorflow`` besides those of
``horovod.keras``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from keras_towers.dropin.arguments import plain, refuse_global_variables
from keras_towers.horovod.matching import waiting


def _tensor(value: Any) -> Any:
    """Return the value as a tensor, or as the slices that it is."""
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(plain(value))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
    **options: Any,
) -> tf.Tensor:
    """Combine a value of the same shape on all ranks.

    Args:
        value: a tensor, variable, array or number, or ``tf.IndexedSlices``.
        name: the name of the operation, the same on all ranks.
        average: Horovod's old form of ``op``.
        prescale_factor: multiplies the value before the operation.
        postscale_factor: multiplies the result.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product``
            or ``Adasum``.
        compression: how the value is sent.
        **options: ``device_dense``, ``device_sparse``, ``process_set`` and
            ``ignore_name_scope`` of ``horovod.tensorflow``.

    Returns:
        A tensor with the shape and dtype of the value.
    """
    with waiting("allreduce", **options):
        return hvd.allreduce(
            _tensor(value),
            name=name,
            average=average,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            op=op,
            compression=compression,
            **options,
        )


def grouped_allreduce(values: Sequence[Any], **options: Any) -> list[tf.Tensor]:
    """Combine several values on all ranks at once, as ``allreduce`` does.

    Args:
        values: as in ``allreduce``.
        **options: as in ``allreduce``.
    """
    with waiting("grouped_allreduce", **options):
        return hvd.grouped_allreduce([_tensor(v) for v in values], **options)


def allgather(value: Any, name: str | None = None, **options: Any) -> tf.Tensor:
    """Concatenate the ranks' values on the first dimension.

    Args:
        value: as in ``allreduce``; the first dimensions may differ.
        name: the name of the operation, the same on all ranks.
        **options: ``process_set`` and ``ignore_name_scope``.

    Returns:
        The values in rank order.
    """
    with waiting("allgather", **options):
        return hvd.allgather(_tensor(value), name=name, **options)


def grouped_allgather(values: Sequence[Any], **options: Any) -> list[tf.Tensor]:
    """Concatenate several values of all ranks, as ``allgather`` does.

    Args:
        values: as in ``allgather``.
        **options: as in ``allgather``.
    """
    with waiting("grouped_allgather", **options):
        return hvd.grouped_allgather([_tensor(v) for v in values], **options)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, **options: Any
) -> tf.Tensor:
    """Send the value of one rank to all ranks.

    Args:
        value: as in ``allreduce``.
        root_rank: the rank whose value is sent.
        name: the name of the operation, the same on all ranks.
        **options: ``process_set`` and ``ignore_name_scope``.

    Returns:
        The value of rank ``root_rank``.
    """
    with waiting("broadcast", **options):
        return hvd.broadcast(_tensor(value), root_rank, name=name, **options)


def broadcast_(
    variables: Iterable[Any], root_rank: int, **options: Any
) -> list[tf.Tensor]:
    """Set variables to their values on one rank, in place.

    Args:
        variables: Keras or TensorFlow variables, all on one device.
        root_rank: the rank whose values are used.
        **options: ``name`` and ``process_set``.

    Returns:
        The values.
    """
    with waiting("broadcast_", **options):
        return hvd.broadcast_(
            [plain(variable) for variable in variables], root_rank, **options
        )


def reducescatter(
    value: Any, name: str | None = None, op: Any = hvd.Average, **options: Any
) -> tf.Tensor:
    """Combine a value as ``allreduce`` does, and give each rank its rows.

    Args:
        value: as in ``allreduce``.
        name: the name of the operation, the same on all ranks.
        op: ``Average`` or ``Sum``.
        **options: ``device_dense``, ``compression``, ``process_set``,
            ``ignore_name_scope``, ``prescale_factor`` and
            ``postscale_factor``.

    Returns:
        This rank's share of the rows.
    """
    with waiting("reducescatter", **options):
        return hvd.reducescatter(_tensor(value), name=name, op=op, **options)


def grouped_reducescatter(
    values: Sequence[Any], **options: Any
) -> list[tf.Tensor]:
    """Combine several values at once, as ``reducescatter`` does.

    Args:
        values: as in ``allreduce``.
        **options: as in ``reducescatter``.
    """
    with waiting("grouped_reducescatter", **options):
        return hvd.grouped_reducescatter(
            [_tensor(value) for value in values], **options
        )


def alltoall(
    value: Any, splits: Any = None, name: str | None = None, **options: Any
) -> Any:
    """Send each rank a part of the rows, and receive a part of each rank's.

    Args:
        value: as in ``allreduce``.
        splits: how many rows each rank is sent; None: equally many.
        name: the name of the operation, the same on all ranks.
        **options: ``process_set`` and ``ignore_name_scope``.

    Returns:
        The rows received, in rank order; with ``splits`` a pair of these and
        of how many came from each rank.
    """
    with waiting("alltoall", **options):
        return hvd.alltoall(_tensor(value), splits, name=name, **options)


def join() -> int:
    """Wait until all ranks have called this; for ranks with unequal data.

    Until then other ranks go on training: where a rank that waits here has
    nothing to give, zeros take its place. As in Horovod, these ranks can only
    reduce, so their gradients have to be dense (``sparse_as_dense=True``).

    Returns:
        The rank that was the last one.
    """
    # Not marked: others go on, and this rank knows that.
    return int(hvd.join())


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Set variables to their values on one rank.

    Args:
        variables: Keras or TensorFlow variables, in the same order on all
            ranks.
        root_rank: the rank whose values are used.
        process_set: the participating processes.
        inplace: avoid a temporary copy.
    """
    variables = [plain(variable) for variable in variables]
    if variables:
        with waiting("broadcast_variables", process_set):
            hvd.broadcast_variables(
                variables, root_rank, process_set=process_set, inplace=inplace
            )


def broadcast_object(obj: Any, root_rank: int = 0, **options: Any) -> Any:
    """Send an object of one rank to all ranks.

    Args:
        obj: anything that can be pickled; what other ranks give is ignored.
        root_rank: the rank whose object is sent.
        **options: ``name`` and ``process_set``.

    Returns:
        The object.
    """
    with waiting("broadcast_object", **options):
        return hvd.broadcast_object(obj, root_rank, **options)


def allgather_object(obj: Any, **options: Any) -> list[Any]:
    """Send an object of every rank to all ranks.

    Args:
        obj: anything that can be pickled.
        **options: ``name`` and ``process_set``.

    Returns:
        The objects, in rank order.
    """
    with waiting("allgather_object", **options):
        return hvd.allgather_object(obj, **options)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no global variables.

    Args:
        root_rank: the rank whose values were wanted.

    Raises:
        TowerError: always, as in Horovod when TensorFlow runs eagerly.
    """
    refuse_global_variables("hvd", root_rank)
