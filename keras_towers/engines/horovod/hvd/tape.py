"""``DistributedGradientTape``: gradients that are reduced when asked for."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf

from keras_towers.engines.dropin import variable_key
from keras_towers.engines.horovod.hvd.functions import prepare_process
from keras_towers.engines.horovod.hvd.optimizer import (
    checked_options,
    layers_in,
)
from keras_towers.engines.horovod.hvd.reducer import GradientReducer, Options
from keras_towers.errors import TowerError
from keras_towers.transport import next_key

if TYPE_CHECKING:
    _GradientTape = Any
else:  # A mixin for tapes.
    _GradientTape = object


@functools.cache
def _reducer(options: Options, key: str) -> GradientReducer:
    """The one reducer of all tapes that an eager loop makes in one place."""
    return GradientReducer(options, key)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Make a tape whose ``gradient`` is reduced over all ranks.

    For custom loops, with a plain optimizer: an optimizer that is distributed
    reduces by itself.

    Args:
        gradtape: a tape, used or not.
        device_dense: as for ``DistributedOptimizer``, like all that follow.

    Returns:
        A tape of the same class that has recorded the same. Its ``gradient``
        takes variables of Keras and TensorFlow, in any structure.

    Raises:
        TowerError: an argument is invalid, or ``hvd.init()`` was not called.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(x, training=True), y)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> grads = tape.gradient(loss, model.trainable_variables)
        >>> optimizer.apply(grads, model.trainable_variables)
    """
    options = checked_options(
        "DistributedGradientTape",
        name="DistributedGradientTape",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        op=op,
        groups=groups,
        num_groups=num_groups,
        process_set=process_set,
        scale_local=scale_local_gradients,
    )
    prepare_process()
    tape: Any = copy.copy(gradtape)
    cls: Any = type(gradtape)
    tape.__class__ = _distributed_class(cls)
    tape._options = options
    tape._local_keys = set()
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    *args: Any,
    local_layers: Any = None,
    **kwargs: Any,
) -> tf.GradientTape:
    """A ``DistributedGradientTape`` that does not reduce some layers.

    Args:
        gradtape: a tape.
        *args: as for ``DistributedGradientTape``.
        local_layers: a built layer or layers that each rank trains with its
            own gradients.
        **kwargs: as for ``DistributedGradientTape``.

    Returns:
        The tape.

    Raises:
        TowerError: ``local_layers`` are not layers.
    """
    tape: Any = DistributedGradientTape(gradtape, *args, **kwargs)
    for layer in layers_in(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


@functools.cache
def _distributed_class(base: Any) -> type:
    if issubclass(base, _Distributed):
        raise TowerError(
            "the tape is already distributed: call "
            "hvd.DistributedGradientTape only once per tape."
        )
    return type(base.__name__, (_Distributed, base), {})


class _Distributed(_GradientTape):
    """Mixin that makes a distributed tape of its original class."""

    _options: Options
    _local_keys: set[Any]

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of a variable, as in Horovod."""
        self._local_keys.add(variable_key(source))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The gradients of all ranks, in the structure of the sources."""
        del use_generic_names  # Names are the same on all ranks in any case.
        grads = super().gradient(target, sources, output_gradients, **kwargs)
        reducer = _reducer(self._options, next_key("tape"))
        reducer.local_keys = self._local_keys
        reduced = reducer.reduce(
            tf.nest.flatten(grads), tf.nest.flatten(sources)
        )
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[Any], list[Any]]:
        """Pairs of a local source and its gradient, and of a global one."""
        grads = self.gradient(target, sources, *args, **kwargs)
        pairs: tuple[list[Any], list[Any]] = [], []
        for source, grad in zip(sources, grads, strict=True):
            is_global = variable_key(source) not in self._local_keys
            pairs[is_global].append((source, grad))
        return pairs
