"""Horovod's operations on tensors, Keras variables, arrays and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from keras_towers.errors import TowerError


def _tensor(value: Any) -> tf.Tensor:
    """Return a tensor that holds the value."""
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
        name: what the operation is called, on all ranks alike.
        average: Horovod's old form of ``op``.
        prescale_factor: the value is multiplied by it before.
        postscale_factor: the result is multiplied by it.
        op: ``Average``, which None means, ``Sum``, ``Min``, ``Max``,
            ``Product`` or ``Adasum``.
        compression: how the value travels.

    Returns:
        A tensor of the value's shape and type.
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
    """Put the ranks' values behind one another on the first dimension.

    Args:
        value: as in ``allreduce``; the first dimensions may differ.
        name: what the operation is called, on all ranks alike.

    Returns:
        The values in the order of the ranks.
    """
    return hvd.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Give every rank the value of one.

    Args:
        value: as in ``allreduce``.
        root_rank: whose value it is.
        name: what the operation is called, on all ranks alike.

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
        name: what the operation is called, on all ranks alike.
        op: ``Average`` or ``Sum``.

    Returns:
        This rank's part of the rows.
    """
    return hvd.reducescatter(_tensor(value), name=name, op=op)


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Set variables to what they are on one rank.

    Args:
        variables: Keras's or TensorFlow's, in the same order on all ranks.
        root_rank: the rank whose values they get.
        process_set: the processes that take part.
        inplace: without a temporary copy.
    """
    variables = [_plain(variable) for variable in variables]
    if variables:
        hvd.broadcast_variables(
            variables, root_rank, process_set=process_set, inplace=inplace
        )


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse, saying what to use: TensorFlow 2 has no global variables.

    Args:
        root_rank: the rank whose values were wanted.

    Raises:
        TowerError: always, as Horovod does when TensorFlow runs eagerly.
    """
    raise TowerError(
        f"broadcast_global_variables({root_rank}) has nothing to work on: "
        "TensorFlow 2 keeps no list of all variables. Name them: "
        "hvd.broadcast_variables(model.weights + model.optimizer.variables, "
        f"root_rank={root_rank}). In fit, use callbacks="
        f"[hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})]."
    )
