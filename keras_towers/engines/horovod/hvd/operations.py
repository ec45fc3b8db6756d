"""Horovod's operations on tensors, Keras variables, arrays and numbers.

Their first argument may be any of these. They are differentiable if Horovod's
are. An operation takes the arguments of ``horovod.tensorflow``, and those of
``horovod.keras`` if that module has it. The two order them differently: the
second one is the name that ``horovod.keras`` has there, if it is text or None.
``SyncBatchNormalization`` is a layer that uses them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from keras_towers.engines import dropin
from keras_towers.engines.dropin import distributed_models, use_connection
from keras_towers.engines.horovod.horovod_transport import (
    HorovodTransport,
    connect,
)
from keras_towers.fit.weights.copies import native
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.jobs.rendezvous import activity
from keras_towers.reduction.gradients import Gradient
from keras_towers.transport import next_key

_Result = TypeVar("_Result")
# A tensor, variable, array or number.
_Value: TypeAlias = "Gradient | Variable | np.ndarray | float"


@functools.wraps(hvd.init)
def init(*args: object, **kwargs: object) -> None:
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
    use_connection(HorovodTransport)
    distributed_models.patch_keras(hvd.is_initialized)


# For callbacks in a script that has not called init().
use_connection(HorovodTransport, as_default=True)


def _tensor(value: _Value) -> Gradient:
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value)


def _tensors(values: Iterable[_Value]) -> list[Gradient]:
    return [_tensor(value) for value in values]


def _variables(variables: Iterable[Variable]) -> list[tf.Variable]:
    return [native(variable) for variable in variables]


# The arguments of the functions that ``horovod.keras`` has, too. Its own module
# is not imported: the import would give this one.
OF_KERAS: dict[str, str] = {
    "allgather": "value name",
    "allreduce": (
        "value name average prescale_factor postscale_factor op compression"
    ),
    "broadcast": "value root_rank name",
    "reducescatter": "value name op",
}


def _adapt(
    function: Callable[..., _Result],
    convert: Callable[[Any], object] = lambda value: value,
) -> Callable[..., _Result]:
    """Convert a function's first argument, and report it to the stall watch.

    Args:
        function: Horovod's function.
        convert: converts its first argument.
    """
    own = inspect.signature(function)
    names = OF_KERAS.get(function.__name__, " ".join(own.parameters)).split()
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    of_keras = inspect.Signature([inspect.Parameter(n, kind) for n in names])
    names_of_first = {next(iter(s.parameters)) for s in (own, of_keras)}

    @functools.wraps(function)
    def run(*args: object, **kwargs: Any) -> _Result:
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
        activity.mark(function.__name__)
        try:
            return function(value, **arguments)
        finally:
            activity.mark_done()

    return run


_OnTensor = Callable[..., tf.Tensor]
_OnTensors = Callable[..., list[tf.Tensor]]

allgather: _OnTensor = _adapt(hvd.allgather, _tensor)
allreduce: _OnTensor = _adapt(hvd.allreduce, _tensor)
broadcast: _OnTensor = _adapt(hvd.broadcast, _tensor)
reducescatter: _OnTensor = _adapt(hvd.reducescatter, _tensor)
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


@keras.saving.register_keras_serializable("keras_towers.horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``BatchNormalization`` with statistics of all ranks' batches in training.

    Ranks may have batches of different sizes, and masks. All ranks have to call
    the layer equally often. The moving statistics are the same on all ranks.

    Args:
        fused: there is no fused form.
        **kwargs: as for ``keras.layers.BatchNormalization``.

    Raises:
        TowerError: ``fused`` is True or None.

    Example:
        >>> layer = hvd.SyncBatchNormalization(momentum=0.9)
    """

    def __init__(self, fused: bool | None = False, **kwargs: object):
        if fused in (True, None):
            raise TowerError(
                "SyncBatchNormalization has no fused form: leave out "
                f"fused={fused}."
            )
        super().__init__(**kwargs)

    # Keras computes the statistics of each rank. They are combined by the rule
    # of Chan, Golub and LeVeque, which does not cancel if the mean is large.
    def _moments(
        self, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        moments = super()._moments(inputs, mask)
        if compat.in_stateless_scope():  # Keras infers a shape.
            return moments
        mean, variance = (tf.reshape(moment, [-1]) for moment in moments)
        if mask is None:
            values = tf.size(inputs)
        else:
            per_entry = tf.size(inputs) // tf.maximum(tf.size(mask), 1)
            values = per_entry * tf.math.count_nonzero(mask, dtype=tf.int32)
        count = tf.cast(values / tf.size(mean), mean.dtype)
        # Makes the exchange follow the previous step of a loop.
        with tf.control_dependencies([self.moving_mean._value.read_value()]):
            statistics = tf.stack([mean, variance, tf.ones_like(mean) * count])
        ranks = _gather(statistics[tf.newaxis])
        means, variances, counts = tf.unstack(ranks, axis=1)
        shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))
        mean = tf.reduce_sum(shares * means, 0)
        between = tf.math.squared_difference(means, mean)
        return mean, tf.reduce_sum(shares * (variances + between), 0)


@tf.custom_gradient
def _gather(
    statistics: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Concatenate the rows [1, 3, channels] of all ranks."""
    transport = HorovodTransport()

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        # Every rank's loss depends on this rank's statistics.
        key = next_key("batch_norm_gradient")
        (total,) = transport.all_reduce([upstream], key)
        # The rank may change in an elastic job.
        return total[hvd.rank_op()][tf.newaxis]

    return transport.all_gather(statistics, next_key("batch_norm")), gradient
