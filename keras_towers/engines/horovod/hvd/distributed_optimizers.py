"""Optimizers and tapes that reduce their gradients over the ranks."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from keras_towers.engines.dropin import (
    Compression,
    distributed_models,
    variable_key,
)
from keras_towers.engines.dropin.gradient_reducer import distribute, reducer_of
from keras_towers.engines.horovod.hvd.horovod_reducer import (
    GradientReducer,
    ReductionOptions,
    checked_options,
)
from keras_towers.engines.horovod.hvd.operations import prepare_process
from keras_towers.fit.context.identity_dict import IdentityKey
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure, Variable
from keras_towers.reduction.gradients import Gradient
from keras_towers.transport import next_key

if TYPE_CHECKING:
    _GradientTape = Any
else:  # A mixin for tapes.
    _GradientTape = object


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Variable]] | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make an optimizer reduce its gradients over all ranks before it updates.

    Pass the result to ``model.compile``, or use it in a custom training loop.

    Unlike Horovod's function, this modifies and returns the optimizer itself,
    so a used optimizer keeps its slots and iterations. It supports ``Adasum``,
    and can sum sparse gradients over backward passes. ``optimizer.iterations``
    counts updates, not backward passes.

    Args:
        optimizer: any optimizer of Keras 3, possibly a ``LossScaleOptimizer``.
            You may also wrap it in one later, as ``compile`` does.
        name: the prefix of the names in Horovod's timeline.
        device_dense: the device on which dense gradients are reduced.
        device_sparse: the device on which sparse gradients are gathered.
        compression: how dense gradients are sent: ``hvd.Compression.none``,
            ``hvd.Compression.fp16``, or any object with ``compress(tensor)``
            and ``decompress(tensor, context)``.
        sparse_as_dense: reduce sparse gradients as dense ones.
        gradient_predivide_factor: for averages: divide by this factor before
            the sum, and by the remaining factor after it.
        op: ``hvd.Average``, ``hvd.Sum`` or, over MPI, ``hvd.Adasum``.
        backward_passes_per_step: the number of calls per update; only updates
            communicate.
        average_aggregated_gradients: use the mean of these passes instead of
            their sum.
        num_groups: Horovod's deprecated form of ``groups``.
        groups: a number of groups, or lists of variables whose gradients are
            reduced together.
        process_set: the processes to reduce over.
        scale_local_gradients: divide gradients of local variables by the number
            of ranks.

    Returns:
        The optimizer.

    Raises:
        TowerError: an argument is invalid, or ``hvd.init()`` was not called.
    """
    options = checked_options(
        name=name or f"Distributed{type(optimizer).__name__}",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        num_groups=num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    distribute(
        optimizer,
        GradientReducer(options),
        backward_passes_per_step,
        average_aggregated_gradients,
    )
    prepare_process()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *args: Any,
    local_layers: keras.Layer | Iterable[keras.Layer] | None = None,
    **kwargs: Any,
) -> keras.optimizers.Optimizer:
    """A ``DistributedOptimizer`` that does not reduce some layers.

    Args:
        optimizer: any optimizer of Keras 3.
        *args: as for ``DistributedOptimizer``.
        local_layers: a layer or layers, built or not, that each rank trains
            with its own gradients.
        **kwargs: as for ``DistributedOptimizer``.

    Returns:
        The optimizer.

    Raises:
        TowerError: ``local_layers`` are not layers.
    """
    layers = _layers_in(local_layers)
    optimizer = DistributedOptimizer(optimizer, *args, **kwargs)
    reducer = reducer_of(optimizer)
    assert reducer is not None
    reducer.local_layers += layers
    return optimizer


def load_model(
    filepath: object,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, object] | None = None,
    compression: Compression = hvd.Compression.none,
    legacy_opts: bool = False,
    **kwargs: object,
) -> keras.Model:
    """Load a model and make its optimizer a distributed one.

    The optimizer resumes with its saved slots and iterations. A model saved
    without an optimizer is loaded without one.

    Args:
        filepath: a ``.keras`` or ``.h5`` file of any Keras 3 model.
        custom_optimizers: optimizer classes that are not part of Keras.
        custom_objects: objects by name, as for ``keras.models.load_model``.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: ignored; it has no meaning in Keras 3.
        **kwargs: as for ``keras.models.load_model``.

    Returns:
        The model.
    """
    del legacy_opts
    return distributed_models.load_model(
        functools.partial(DistributedOptimizer, compression=compression),
        filepath,
        custom_optimizers,
        custom_objects,
        **kwargs,
    )


def DistributedGradientTape(
    gradtape: tf.GradientTape, *args: object, **kwargs: object
) -> tf.GradientTape:
    """Make a tape whose ``gradient`` is reduced over all ranks.

    For custom loops with a plain optimizer. A distributed optimizer reduces
    gradients by itself.

    Args:
        gradtape: a tape, before or after it has recorded.
        *args: as for ``horovod.tensorflow.DistributedGradientTape``;
            ``DistributedOptimizer`` describes them.
        **kwargs: as for ``*args``.

    Returns:
        A tape of the same class with the same recording. Its ``gradient`` takes
        variables of Keras and TensorFlow, in any structure.

    Raises:
        TowerError: an argument is invalid, or ``hvd.init()`` was not called.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(x, training=True), y)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> grads = tape.gradient(loss, model.trainable_variables)
        >>> optimizer.apply(grads, model.trainable_variables)
    """
    signature = inspect.signature(hvd.DistributedGradientTape)
    call = signature.bind(gradtape, *args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    tape: Any = copy.copy(arguments.pop("gradtape"))
    options = checked_options(name="DistributedGradientTape", **arguments)
    prepare_process()
    tape_class: Any = type(tape)
    tape.__class__ = _distributed_tape(tape_class)
    tape._options = options
    tape._local_keys = set()
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    *args: object,
    local_layers: keras.Layer | Iterable[keras.Layer] | None = None,
    **kwargs: object,
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
    for layer in _layers_in(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


@functools.cache
def _distributed_tape(base: Any) -> type:
    """Make a distributed subclass of a class of tapes."""
    if issubclass(base, _DistributedTape):
        raise TowerError(
            "the tape is already distributed: call "
            "hvd.DistributedGradientTape only once per tape."
        )
    return type(base.__name__, (_DistributedTape, base), {})


@functools.cache
def _reducer(options: ReductionOptions, key: str) -> GradientReducer:
    """The reducer of all tapes that one line of an eager loop creates."""
    return GradientReducer(options, key)


_Pair: TypeAlias = tuple[Variable, Gradient | None]


class _DistributedTape(_GradientTape):
    """Mixin for a tape whose gradients are reduced over the ranks."""

    _options: ReductionOptions
    _local_keys: set[IdentityKey[tf.Variable]]

    def register_local_source(self, source: Variable) -> None:
        """Do not reduce the gradient of a variable, as in Horovod."""
        self._local_keys.add(variable_key(source))

    def gradient(
        self,
        target: Structure,
        sources: Structure,
        output_gradients: Structure = None,
        use_generic_names: bool = False,
        **kwargs: object,
    ) -> Structure:
        """Reduced gradients, in the structure of the sources."""
        del use_generic_names  # Names always match on all ranks.
        grads = super().gradient(target, sources, output_gradients, **kwargs)
        reducer = _reducer(self._options, next_key("tape"))
        reducer.local_keys = self._local_keys
        reduced = reducer.reduce(
            tf.nest.flatten(grads), tf.nest.flatten(sources)
        )
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Structure,
        sources: Sequence[Variable],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[_Pair], list[_Pair]]:
        """Pairs (source, gradient): of local sources, and of global ones."""
        grads = self.gradient(target, sources, *args, **kwargs)
        pairs: tuple[list[_Pair], list[_Pair]] = [], []
        for source, grad in zip(sources, grads, strict=True):
            is_global = variable_key(source) not in self._local_keys
            pairs[is_global].append((source, grad))
        return pairs


def _layers_in(local_layers: object) -> list[keras.Layer]:
    """The layers in a user's argument ``local_layers``."""
    layers = [] if local_layers is None else keras.tree.flatten(local_layers)
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise TowerError(
                "local_layers takes a Keras layer, or a list of them, but got "
                f"{layer!r}."
            )
    return layers
