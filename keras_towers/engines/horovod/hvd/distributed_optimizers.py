"""Optimizers and tapes that reduce their gradients over Horovod's ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.util import split_list

from keras_towers.engines.dropin import (
    Compression,
    check_compression,
    distributed_models,
    variable_key,
)
from keras_towers.engines.dropin.gradient_reducer import (
    Reducer,
    distribute,
    name_or_kind,
    reducer_of,
)
from keras_towers.engines.horovod.horovod_transport import HorovodTransport
from keras_towers.engines.horovod.hvd.operations import prepare_process
from keras_towers.fit.context.identity_dict import IdentityKey
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure, Variable
from keras_towers.reduction.gradients import Gradient, divide
from keras_towers.reduction.rank_sum import sum_over_ranks
from keras_towers.transport import Transport, next_key

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
    options = _checked_options(
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
    options = _checked_options(name="DistributedGradientTape", **arguments)
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


@dataclasses.dataclass(frozen=True)
class ReductionOptions:
    """Options of a reduction; see ``DistributedOptimizer``.

    Attributes:
        groups: a number of groups, or the keys of each group's variables.
    """

    name: str
    device_dense: str
    device_sparse: str
    compression: Compression
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: int
    groups: int | tuple[tuple[IdentityKey[tf.Variable], ...], ...] | None
    process_set: hvd.ProcessSet
    scale_local_gradients: bool


def _checked_options(
    num_groups: int, groups: int | list[list[Variable]] | None, **arguments: Any
) -> ReductionOptions:
    """Convert a user's arguments to options, or raise ``TowerError``."""
    if not hvd.is_initialized():
        raise TowerError(
            "Horovod is not initialized: call hvd.init() before you distribute "
            "an optimizer or a tape."
        )
    if groups is None and num_groups:
        groups = num_groups
    keys: int | tuple[tuple[IdentityKey[tf.Variable], ...], ...] | None
    if isinstance(groups, list):
        keys = tuple(
            tuple(variable_key(variable) for variable in group)
            for group in groups
        )
    elif groups is None or (isinstance(groups, int) and groups >= 0):
        keys = groups
    else:
        raise TowerError(
            f"groups is {groups!r}: give a number of groups, or a list of "
            "lists of variables."
        )
    options = ReductionOptions(groups=keys, **arguments)
    _check_op(options.op)
    check_compression(options.compression, "hvd")
    factor = options.gradient_predivide_factor
    if factor != 1.0:
        if options.op != hvd.Average:
            raise TowerError(
                "gradient_predivide_factor applies only to averages: leave it "
                "out, or use op=hvd.Average."
            )
        if factor <= 0 or hvd.rocm_built():
            raise TowerError(
                f"gradient_predivide_factor is {factor!r}: it must be greater "
                "than 0, and 1 with ROCm."
            )
    return options


def _check_op(op: int) -> None:
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise TowerError(
            f"op is {op!r}: give hvd.Average, hvd.Sum or hvd.Adasum."
        )
    if op == hvd.Adasum and hvd.size() > 1:
        if not hvd.mpi_enabled():
            raise TowerError(
                "hvd.Adasum needs a Horovod that was built with MPI and runs "
                "over MPI (horovodrun --mpi); this one runs over Gloo. Use "
                "hvd.Average."
            )
        if hvd.size() & (hvd.size() - 1):
            raise TowerError(
                "hvd.Adasum needs a power of 2 as the number of ranks, not "
                f"{hvd.size()}. Use hvd.Average or another number of ranks."
            )


@tf.custom_gradient
def _unknown(
    grad: Gradient,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Return a gradient that is no constant to TensorFlow."""
    return compat.unknown(grad), lambda upstream: upstream


class GradientReducer(Reducer):
    """Reduces the gradients of one optimizer or tape over the ranks.

    Args:
        options: how to reduce.
        key: as for ``Reducer``.
    """

    module = "hvd"

    def __init__(self, options: ReductionOptions, key: str | None = None):
        super().__init__(options.sparse_as_dense, key)
        self.options = options
        self.all_ranks = options.process_set.process_set_id == 0

    def transport(self) -> Transport:
        return HorovodTransport(self.options.process_set)

    def communicates(self) -> bool:
        processes = self.options.process_set
        return bool(processes.included() and processes.size() > 1)

    def scale_local(self, grad: Gradient) -> Gradient:
        if not self.options.scale_local_gradients:
            return grad
        return self._divide_by_size(grad)

    def reduce_global(
        self, grads: list[Gradient], variables: list[Variable]
    ) -> list[Gradient]:
        sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
        if any(sparse) and self.options.op == hvd.Adasum:
            raise TowerError(
                "Adasum cannot reduce sparse gradients, such as the gradient "
                f"of {name_or_kind(variables[sparse.index(True)])}. Give "
                "sparse_as_dense=True."
            )
        if not tf.executing_eagerly() and compat.in_xla_context(
            tf.compat.v1.get_default_graph()
        ):
            raise TowerError(
                "Horovod's operations do not run inside XLA: use "
                "model.compile(..., jit_compile=False), or leave jit_compile "
                "out of your tf.function."
            )
        return super().reduce_global(grads, variables)

    def reduce_groups(
        self, grads: list[Gradient], groups: list[list[int]], key: str
    ) -> list[Gradient]:
        results: dict[int, Gradient] = {}
        prefix = f"{self.options.name}_{key}_grad"
        prefix = re.sub("[^a-zA-Z0-9_]", "_", prefix)
        for group in groups:
            first, *rest = group
            name = f"{prefix}_{first}"
            grad = grads[first]
            if isinstance(grad, tf.IndexedSlices):
                results[first] = self._gather(grad, name)
            elif not rest:
                results[first] = hvd.allreduce(
                    _unknown(grad), name=name, **self._arguments()
                )
            else:
                reduced = hvd.grouped_allreduce(
                    [_unknown(grads[index]) for index in group],
                    name=f"{name}_group",
                    **self._arguments(),
                )
                for index, grad in zip(group, reduced, strict=True):
                    results[index] = grad
        return [results[index] for index in range(len(grads))]

    def _gather(self, grad: tf.IndexedSlices, name: str) -> Gradient:
        with tf.device(self.options.device_sparse):
            (gathered,) = sum_over_ranks(self.transport(), [grad], key=name)
        if self.options.op == hvd.Sum:
            return gathered
        return self._divide_by_size(gathered)

    def _arguments(self) -> dict[str, object]:
        # Horovod itself divides by the number of ranks after the sum.
        factor = self.options.gradient_predivide_factor
        return {
            "device_dense": self.options.device_dense,
            "compression": self.options.compression,
            "op": self.options.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "process_set": self.options.process_set,
            "ignore_name_scope": True,
        }

    def _divide_by_size(self, grad: Gradient) -> Gradient:
        return divide(grad, self.options.process_set.size())

    def groups_of(
        self, grads: Sequence[object], variables: Sequence[Variable]
    ) -> list[list[int]]:
        dense = {
            variable_key(variable): index
            for index, (grad, variable) in enumerate(
                zip(grads, variables, strict=True)
            )
            if not isinstance(grad, tf.IndexedSlices)
        }
        groups = self.options.groups or ()
        if isinstance(groups, int):
            groups = split_list(list(dense), groups)
        grouped = [
            [dense.pop(key) for key in group if key in dense]
            for group in groups
        ]
        members = {index for group in grouped for index in group}
        single = [[i] for i in range(len(grads)) if i not in members]
        return [group for group in grouped if group] + single
