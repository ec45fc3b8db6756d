"""Horovod's operations on tensors, Keras variables, arrays and numbers.

Their first argument may be any of these. They are differentiable where
Horovod's are. Those of ``horovod.keras`` take their arguments in its order, and
the options of ``horovod.tensorflow``, too; all others are as there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd
import tensorflow as tf

from keras_towers.engines.dropin import (
    connect_by,
    distributed_models,
    plain,
    refuse_global_variables,
)
from keras_towers.engines.horovod.horovod_transport import (
    HorovodTransport,
    connect,
)
from keras_towers.rendezvous import watch


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
    connect_by(HorovodTransport)
    distributed_models.patch_keras(hvd.is_initialized)


# Callbacks may be used with ranks that were connected otherwise.
connect_by(HorovodTransport, by_default=True)


def _tensor(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(plain(value))


def _tensors(values: Any) -> list[Any]:
    return [_tensor(value) for value in values]


def _variables(variables: Any) -> list[Any]:
    return [plain(variable) for variable in variables]


def _adapted(
    function: Callable[..., Any],
    converted: Callable[[Any], Any] = lambda value: value,
    called_as: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Convert a function's first argument, and let the stall watch see it.

    Args:
        converted: converts that argument.
        called_as: a function that takes some of the arguments in another order,
            which is ours.
    """
    called_as = called_as or function
    signature = inspect.signature(called_as)
    first = next(iter(signature.parameters))

    @functools.wraps(called_as)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = {**signature.bind_partial(*args).arguments, **kwargs}
        if first not in arguments:
            raise TypeError(f"{function.__name__}() needs {first!r}")
        value = converted(arguments.pop(first))
        ranks = arguments.get("process_set", hvd.global_process_set)
        # What is counted has to be done by all ranks.
        if not tf.executing_eagerly() or ranks.process_set_id != 0:
            return function(value, **arguments)
        watch.mark(function.__name__)
        try:
            return function(value, **arguments)
        finally:
            watch.mark_done()

    return run


_OfOne = Callable[..., tf.Tensor]
_OfSeveral = Callable[..., list[tf.Tensor]]

allgather: _OfOne = _adapted(hvd.allgather, _tensor, hvd_keras.allgather)
allreduce: _OfOne = _adapted(hvd.allreduce, _tensor, hvd_keras.allreduce)
broadcast: _OfOne = _adapted(hvd.broadcast, _tensor, hvd_keras.broadcast)
reducescatter: _OfOne = _adapted(
    hvd.reducescatter, _tensor, hvd_keras.reducescatter
)
alltoall: _OfOne = _adapted(hvd.alltoall, _tensor)
grouped_allgather: _OfSeveral = _adapted(hvd.grouped_allgather, _tensors)
grouped_allreduce: _OfSeveral = _adapted(hvd.grouped_allreduce, _tensors)
grouped_reducescatter: _OfSeveral = _adapted(
    hvd.grouped_reducescatter, _tensors
)
broadcast_: _OfSeveral = _adapted(hvd.broadcast_, _variables)
broadcast_variables: Callable[..., None] = _adapted(
    hvd.broadcast_variables, _variables
)
allgather_object: Callable[..., list[Any]] = _adapted(hvd.allgather_object)
broadcast_object: Callable[..., Any] = _adapted(hvd.broadcast_object)


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
