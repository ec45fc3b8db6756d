"""Horovod's operations on tensors, Keras variables, arrays and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from keras_towers.errors import TowerError


def _tensor(value: Any) -> tf.Tensor:
    """Return the value as a tensor."""
    return tf.convert_to_tensor(_plain(value))


def _plain(variable: Any) -> Any:
    """Return the ``tf.Variable`` inside a Keras variable."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return variable


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
) -> tf.Tensor:
    """Combine a value of the same shape on all ranks.

    Args:
        value: a tensor, variable, array or number.
        name: the name of the operation, the same on all ranks.
        average: Horovod's old form of ``op``.
        prescale_factor: multiplies the value before the operation.
        postscale_factor: multiplies the result.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product``
            or ``Adasum``.
        compression: how the value is sent.

    Returns:
        A tensor with the shape and dtype of the value.
    """
    return hvd.allreduce(
        _tensor(value),
        name=name,
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenate the ranks' values on the first dimension.

    Args:
        value: as in ``allreduce``; the first dimensions may differ.
        name: the name of the operation, the same on all ranks.

    Returns:
        The values in rank order.
    """
    return hvd.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Send the value of one rank to all ranks.

    Args:
        value: as in ``allreduce``.
        root_rank: the rank whose value is sent.
        name: the name of the operation, the same on all ranks.

    Returns:
        The value of rank ``root_rank``.
    """
    return hvd.broadcast(_tensor(value), root_rank, name=name)


def reducescatter(
    value: Any, name: str | None = None, op: Any = hvd.Average
) -> tf.Tensor:
    """Combine a value as ``allreduce`` does, and give each rank its rows.

    Args:
        value: as in ``allreduce``.
        name: the name of the operation, the same on all ranks.
        op: ``Average`` or ``Sum``.

    Returns:
        This rank's share of the rows.
    """
    return hvd.reducescatter(_tensor(value), name=name, op=op)


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
    variables = [_plain(variable) for variable in variables]
    if variables:
        hvd.broadcast_variables(
            variables, root_rank, process_set=process_set, inplace=inplace
        )


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no global variables.

    Args:
        root_rank: the rank whose values were wanted.

    Raises:
        TowerError: always, as in Horovod when TensorFlow runs eagerly.
    """
    raise TowerError(
        f"broadcast_global_variables({root_rank}) is not possible: "
        "TensorFlow 2 keeps no list of all variables. Name them: "
        "hvd.broadcast_variables(model.weights + model.optimizer.variables, "
        f"root_rank={root_rank}). In fit, use callbacks="
        f"[hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})]."
    )
