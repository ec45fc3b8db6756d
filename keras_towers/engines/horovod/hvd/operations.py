"""Horovod's operations on tensors, Keras variables, arrays and numbers.

Their first argument may be any of these. They are differentiable if Horovod's
are. An operation takes the arguments of ``horovod.tensorflow``, and those of
``horovod.keras`` if that module has it. The two order them differently: the
second one, if it is text, is the name that ``horovod.keras`` has there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd
import tensorflow as tf

from keras_towers.engines import dropin
from keras_towers.engines.dropin import distributed_models
from keras_towers.engines.horovod.horovod_strategy import (
    HorovodTransport,
    connect,
)
from keras_towers.rendezvous import watch


@functools.wraps(hvd.init)
def init(*args: Any, **kwargs: Any) -> None:
    """Horovod's ``init``, for ranks that any launcher has started."""
    connect(hvd, *args, **kwargs)
    prepare_process()


@functools.wraps(hvd.shutdown)
def shutdown() -> None:
    """Horovod's ``shutdown``; also undoes the changes of ``init`` to Keras."""
    distributed_models.unpatch_keras()
    if hvd.is_initialized():
        HorovodTransport().disconnect()


def prepare_process() -> None:
    """Prepare this process as ``init`` does, after Horovod's own ``init``."""
    HorovodTransport()  # Starts the stall watch.
    dropin.use_connection(HorovodTransport)
    distributed_models.patch_keras(hvd.is_initialized)


# For callbacks in a script that has not called init().
dropin.use_connection(HorovodTransport, as_default=True)


def _tensor(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(dropin.tf_variable(value))


def _tensors(values: Any) -> list[Any]:
    return [_tensor(value) for value in values]


def _variables(variables: Any) -> list[Any]:
    return [dropin.tf_variable(variable) for variable in variables]


def _adapt(
    function: Callable[..., Any],
    convert: Callable[[Any], Any] = lambda value: value,
    like: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Convert a function's first argument, and report it to the stall watch.

    Args:
        function: Horovod's function.
        convert: converts its first argument.
        like: the function of ``horovod.keras``, whose arguments it takes, too.
    """
    like = like or function
    own, of_keras = inspect.signature(function), inspect.signature(like)
    names_of_first = {next(iter(s.parameters)) for s in (own, of_keras)}

    @functools.wraps(like)
    def run(*args: Any, **kwargs: Any) -> Any:
        named = len(args) < 2 or isinstance(args[1], str | None)
        signature = of_keras if named else own
        arguments = {**signature.bind_partial(*args).arguments, **kwargs}
        firsts = names_of_first & arguments.keys()
        if len(firsts) != 1:
            names = " or ".join(sorted(map(repr, names_of_first)))
            raise TypeError(f"{function.__name__}() needs one argument {names}")
        (first,) = firsts
        value = convert(arguments.pop(first))
        ranks = arguments.get("process_set", hvd.global_process_set)
        # Marks are compared between ranks, so all ranks have to make them.
        if not tf.executing_eagerly() or ranks.process_set_id != 0:
            return function(value, **arguments)
        watch.mark(function.__name__)
        try:
            return function(value, **arguments)
        finally:
            watch.mark_done()

    return run


_OnTensor = Callable[..., tf.Tensor]
_OnTensors = Callable[..., list[tf.Tensor]]

allgather: _OnTensor = _adapt(hvd.allgather, _tensor, hvd_keras.allgather)
allreduce: _OnTensor = _adapt(hvd.allreduce, _tensor, hvd_keras.allreduce)
broadcast: _OnTensor = _adapt(hvd.broadcast, _tensor, hvd_keras.broadcast)
reducescatter: _OnTensor = _adapt(
    hvd.reducescatter, _tensor, hvd_keras.reducescatter
)
alltoall: _OnTensor = _adapt(hvd.alltoall, _tensor)
grouped_allgather: _OnTensors = _adapt(hvd.grouped_allgather, _tensors)
grouped_allreduce: _OnTensors = _adapt(hvd.grouped_allreduce, _tensors)
grouped_reducescatter: _OnTensors = _adapt(hvd.grouped_reducescatter, _tensors)
broadcast_: _OnTensors = _adapt(hvd.broadcast_, _variables)
broadcast_variables: Callable[..., None] = _adapt(
    hvd.broadcast_variables, _variables
)
allgather_object: Callable[..., list[Any]] = _adapt(hvd.allgather_object)
broadcast_object: Callable[..., Any] = _adapt(hvd.broadcast_object)


def join() -> int:
    """Wait until all ranks have called this; for ranks with unequal data.

    Until then other ranks go on training, and a rank that waits here takes part
    with zeros. As in Horovod, ranks can then only reduce, so gradients have to
    be dense (``sparse_as_dense=True``).

    Returns:
        The rank that joined last.
    """
    # Not marked for the stall watch: a long wait is expected here.
    return int(hvd.join())


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no global variables.

    Args:
        root_rank: the rank whose values were wanted.

    Raises:
        TowerError: always, as in Horovod when TensorFlow runs eagerly.
    """
    dropin.refuse_global_variables("hvd", root_rank)
