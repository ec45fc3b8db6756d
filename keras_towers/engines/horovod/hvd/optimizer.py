"""Optimizers that reduce their gradients over the ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras

from keras_towers.engines.dropin import check_compression, models, plain
from keras_towers.engines.dropin.optimizer import distribute, reducer_of
from keras_towers.engines.horovod.hvd.functions import prepare_process
from keras_towers.engines.horovod.hvd.reducer import GradientReducer, Options
from keras_towers.errors import TowerError


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make an optimizer reduce its gradients over all ranks before it updates.

    Pass the result to ``model.compile``, or use it in a custom training loop.

    Unlike in Horovod, the optimizer itself is modified and returned, so that a
    used one keeps its slots and iterations; ``Adasum`` is supported; sparse
    gradients may be summed over backward passes; and ``optimizer.iterations``
    counts updates, not backward passes.

    Args:
        optimizer: any optimizer of Keras 3, possibly a
            ``LossScaleOptimizer``; one that is put around it, as ``compile``
            does, is handled.
        name: the prefix of the names in Horovod's timeline.
        device_dense: the device on which dense gradients are reduced.
        device_sparse: the device on which sparse gradients are gathered.
        compression: how dense gradients are sent: ``hvd.Compression.none``,
            ``hvd.Compression.fp16``, or any object with ``compress(tensor)``
            and ``decompress(tensor, context)``.
        sparse_as_dense: reduce sparse gradients as dense ones.
        gradient_predivide_factor: for averages: divide by this factor before
            the sum, and by the rest after it.
        op: ``hvd.Average``, ``hvd.Sum`` or, over MPI, ``hvd.Adasum``.
        backward_passes_per_step: the number of calls per update; only updates
            communicate.
        average_aggregated_gradients: use the mean of these passes instead of
            their sum.
        num_groups: Horovod's old form of ``groups``.
        groups: a number of groups, or lists of variables, to be reduced
            together.
        process_set: the processes to reduce over.
        scale_local_gradients: divide gradients of local variables by the number
            of ranks.

    Returns:
        The optimizer.

    Raises:
        TowerError: an argument is invalid, or ``hvd.init()`` was not called.
    """
    options = checked_options(
        "DistributedOptimizer",
        name=name or f"Distributed{type(optimizer).__name__}",
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
    local_layers: Any = None,
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
    layers = layers_in(local_layers)
    optimizer = DistributedOptimizer(optimizer, *args, **kwargs)
    reducer = reducer_of(optimizer)
    assert reducer is not None
    reducer.local_layers += layers
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
    **kwargs: Any,
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
    return models.load_model(
        functools.partial(DistributedOptimizer, compression=compression),
        filepath,
        custom_optimizers,
        custom_objects,
        **kwargs,
    )


def checked_options(
    what: str, num_groups: int = 0, **arguments: Any
) -> Options:
    """Make options of a user's arguments, or raise ``TowerError``."""
    if not hvd.is_initialized():
        raise TowerError(
            "Horovod is not initialized: call hvd.init() before "
            f"hvd.{what}(...)."
        )
    if num_groups:
        warnings.warn(
            "num_groups is now called groups", DeprecationWarning, stacklevel=3
        )
        if arguments["groups"] is None:
            arguments["groups"] = num_groups
    groups = arguments["groups"]
    if isinstance(groups, list):
        arguments["groups"] = tuple(
            tuple(plain(variable).ref() for variable in group)
            for group in groups
        )
    elif groups is not None and not (isinstance(groups, int) and groups >= 0):
        raise TowerError(
            f"groups is {groups!r}: give a number of groups, or a list of "
            "lists of variables."
        )
    options = Options(**arguments)
    _check_op(options.op)
    check_compression(options.compression, "hvd")
    if options.predivide != 1.0:
        if options.op != hvd.Average:
            raise TowerError(
                "gradient_predivide_factor applies only to averages: leave it "
                "out, or use op=hvd.Average."
            )
        if options.predivide <= 0 or hvd.rocm_built():
            raise TowerError(
                f"gradient_predivide_factor is {options.predivide!r}: it must "
                "be greater than 0, and 1 with ROCm."
            )
    return options


def layers_in(local_layers: Any) -> list[keras.Layer]:
    """The layers, one or several, that a user has given as local."""
    layers = [] if local_layers is None else keras.tree.flatten(local_layers)
    if not all(isinstance(layer, keras.Layer) for layer in layers):
        raise TowerError("local_layers takes a Keras layer or a list of them.")
    return layers


def _check_op(op: Any) -> None:
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
