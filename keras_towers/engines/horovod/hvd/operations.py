"""Horovod's operations on tensors, Keras variables, arrays and numbers.

Their first argument may be any of these. They are differentiable where
Horovod's are. Those of ``horovod.keras`` take the options of
``horovod.tensorflow``, too; all others are as there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from keras_towers.engines.dropin import (
    distributed_models,
    plain,
    refuse_global_variables,
)
from keras_towers.engines.horovod.horovod_transport import (
    HorovodTransport,
    connect,
)

_OfTensors = Callable[..., list[tf.Tensor]]


@functools.wraps(hvd.init)
def init(*args: Any, **kwargs: Any) -> None:
    """Horovod's ``init``; ranks that any launcher started find one another."""
    connect(hvd, *args, **kwargs)
    prepare_process()


@functools.wraps(hvd.shutdown)
def shutdown() -> None:
    """Horovod's ``shutdown``; also restores Keras to before ``init``."""
    distributed_models.unpatch_keras()
    if hvd.is_initialized():
        HorovodTransport().disconnect()


def prepare_process() -> None:
    """Prepare this process as ``init`` does, after Horovod's own ``init``."""
    HorovodTransport()  # Starts the stall watch.
    distributed_models.patch_keras(hvd.is_initialized, HorovodTransport)


def _tensor(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(plain(value))


def _tensors(values: Any) -> list[Any]:
    return [_tensor(value) for value in values]


def _variables(variables: Any) -> list[Any]:
    return [plain(variable) for variable in variables]


def _as_it_is(value: Any) -> Any:
    return value


def _adapted(
    function: Callable[..., Any], converted: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Convert a function's first argument, and let the stall watch see it."""
    signature = inspect.signature(function)
    (first, *_) = signature.parameters

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.arguments[first] = converted(call.arguments[first])
        ranks = call.arguments.get("process_set", hvd.global_process_set)
        # What is counted has to be done by all ranks.
        counts = tf.executing_eagerly() and hvd.is_initialized()
        if not counts or ranks.process_set_id != 0:
            return function(*call.args, **call.kwargs)
        transport = HorovodTransport()
        transport.mark(function.__name__)
        try:
            return function(*call.args, **call.kwargs)
        finally:
            transport.passed()

    return run


_allreduce = _adapted(hvd.allreduce, _tensor)
_allgather = _adapted(hvd.allgather, _tensor)
_broadcast = _adapted(hvd.broadcast, _tensor)
_reducescatter = _adapted(hvd.reducescatter, _tensor)
alltoall: Callable[..., tf.Tensor] = _adapted(hvd.alltoall, _tensor)
grouped_allgather: _OfTensors = _adapted(hvd.grouped_allgather, _tensors)
grouped_allreduce: _OfTensors = _adapted(hvd.grouped_allreduce, _tensors)
grouped_reducescatter: _OfTensors = _adapted(
    hvd.grouped_reducescatter, _tensors
)
broadcast_: _OfTensors = _adapted(hvd.broadcast_, _variables)
broadcast_variables: Callable[..., None] = _adapted(
    hvd.broadcast_variables, _variables
)
allgather_object: Callable[..., list[Any]] = _adapted(
    hvd.allgather_object, _as_it_is
)
broadcast_object: Callable[..., Any] = _adapted(hvd.broadcast_object, _as_it_is)


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
    return _allreduce(
        value,
        name=name,
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
        **options,
    )


def allgather(value: Any, name: str | None = None, **options: Any) -> tf.Tensor:
    """Concatenate the ranks' values on the first dimension.

    Args:
        value: as in ``allreduce``; the first dimensions may differ.
        name: the name of the operation, the same on all ranks.
        **options: ``process_set`` and ``ignore_name_scope``.

    Returns:
        The values in rank order.
    """
    return _allgather(value, name=name, **options)


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
    return _broadcast(value, root_rank, name=name, **options)


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
    return _reducescatter(value, name=name, op=op, **options)


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


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no global variables.

    Args:
        root_rank: the rank whose values were wanted.

    Raises:
        TowerError: always, as in Horovod when TensorFlow runs eagerly.
    """
    refuse_global_variables("hvd", root_rank)
