"""``DistributedOptimizer`` and ``PartialDistributedOptimizer``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.horovod import compiling, wrapping
from keras_towers.horovod.passes import Passes
from keras_towers.horovod.reducer import GradientReducer, Options


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

    Give the result to ``model.compile``, or use it in a loop of your own.

    Other than in Horovod, the optimizer itself is changed and returned, so that
    one which has trained keeps its momenta and iterations; ``Adasum`` is
    possible; sparse gradients may be summed over backward passes; and
    ``optimizer.iterations`` counts updates, not backward passes.

    Args:
        optimizer: any optimizer of Keras 3. A ``LossScaleOptimizer`` goes
            inside; ``compile`` puts its own one there.
        name: the beginning of the names in Horovod's timeline.
        device_dense: where dense gradients are reduced.
        device_sparse: where sparse gradients are gathered.
        compression: how dense gradients travel: ``hvd.Compression.none``,
            ``hvd.Compression.fp16``, or any object with ``compress(tensor)``
            and ``decompress(tensor, context)``.
        sparse_as_dense: reduce sparse gradients as dense ones.
        gradient_predivide_factor: divides before the sum, what remains of the
            average after it.
        op: ``hvd.Average``, ``hvd.Sum`` or, over MPI, ``hvd.Adasum``.
        backward_passes_per_step: how many calls make one update; only that one
            communicates.
        average_aggregated_gradients: take the mean of these passes, not the
            sum.
        num_groups: Horovod's old form of ``groups``.
        groups: a number of groups, or lists of variables, that are reduced
            together.
        process_set: the processes to reduce over.
        scale_local_gradients: divide gradients of local variables by the number
            of ranks.

    Returns:
        The optimizer.

    Raises:
        TowerError: an argument does not fit, or ``hvd.init()`` is missing.
    """
    _check_optimizer(optimizer)
    if not hvd.is_initialized():
        raise TowerError(
            "Horovod is not initialized: call hvd.init() before "
            "hvd.DistributedOptimizer(...)."
        )
    if num_groups:
        warnings.warn(
            "num_groups is now called groups", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    _check_options(
        op, gradient_predivide_factor, backward_passes_per_step, groups
    )
    if not all(
        callable(getattr(compression, method, None))
        for method in ("compress", "decompress")
    ):
        raise TowerError(
            f"compression is {compression!r}, which cannot compress and "
            "decompress. Give hvd.Compression.none or hvd.Compression.fp16."
        )
    reducer = GradientReducer(
        Options(
            name=name or f"Distributed{type(optimizer).__name__}",
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            predivide=gradient_predivide_factor,
            op=op,
            groups=groups,
            process_set=process_set,
            scale_local=scale_local_gradients,
        )
    )
    passes = None
    if backward_passes_per_step > 1:
        passes = Passes(backward_passes_per_step, average_aggregated_gradients)
    # Horovod's own init may have been called, not this package's.
    compiling.replace()
    wrapping.wrap(optimizer, wrapping.Distribution(reducer, passes))
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *args: Any,
    local_layers: Any = None,
    **kwargs: Any,
) -> keras.optimizers.Optimizer:
    """``DistributedOptimizer`` that leaves the gradients of some layers alone.

    Args:
        optimizer: any optimizer of Keras 3.
        *args: as of ``DistributedOptimizer``.
        local_layers: a layer or layers, built or not, that every rank trains
            on its own gradients.
        **kwargs: as of ``DistributedOptimizer``.

    Returns:
        The optimizer.

    Raises:
        TowerError: ``local_layers`` are not layers.
    """
    if local_layers is None:
        local_layers = []
    elif isinstance(local_layers, keras.Layer):
        local_layers = [local_layers]
    local_layers = (
        list(local_layers) if isinstance(local_layers, Iterable) else [None]
    )
    if not all(isinstance(layer, keras.Layer) for layer in local_layers):
        raise TowerError("local_layers takes a Keras layer or a list of them.")
    optimizer = DistributedOptimizer(optimizer, *args, **kwargs)
    state = wrapping.distribution_of(optimizer)
    assert state is not None
    state.reducer.local_layers += local_layers
    return optimizer


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, compat.BaseOptimizer):
        raise TowerError(
            f"hvd.DistributedOptimizer takes an optimizer of Keras 3, such as "
            f"keras.optimizers.SGD(0.1), and got {optimizer!r}."
        )
    inner = optimizer
    while inner is not None:
        if wrapping.distribution_of(inner) is not None:
            raise TowerError(
                f"the optimizer {inner.name!r} is distributed already: call "
                "hvd.DistributedOptimizer once for each optimizer."
            )
        inner = getattr(inner, "inner_optimizer", None)


def _check_options(
    op: Any, predivide: float, backward_passes: int, groups: Any
) -> None:
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise TowerError(
            f"op is {op!r}: gradients are combined by hvd.Average, hvd.Sum or "
            "hvd.Adasum."
        )
    if op == hvd.Adasum and hvd.size() > 1:
        if not hvd.mpi_enabled():
            raise TowerError(
                "hvd.Adasum needs a Horovod that was built with MPI and is run "
                "over it (horovodrun --mpi); this one runs over Gloo. Use "
                "hvd.Average."
            )
        if hvd.size() & (hvd.size() - 1):
            raise TowerError(
                "hvd.Adasum needs 2, 4, 8 or another power of 2 ranks, not "
                f"{hvd.size()}. Use hvd.Average or another number."
            )
    if predivide != 1.0:
        if op != hvd.Average:
            raise TowerError(
                "gradient_predivide_factor splits an average: leave it out, "
                "or use op=hvd.Average."
            )
        if predivide <= 0 or hvd.rocm_built():
            raise TowerError(
                f"gradient_predivide_factor is {predivide!r}: it has to be "
                "above 0, and 1 where Horovod runs on ROCm."
            )
    if not isinstance(backward_passes, int) or backward_passes < 1:
        raise TowerError(
            f"backward_passes_per_step is {backward_passes!r}: give 1 or more."
        )
    if not (
        groups is None
        or isinstance(groups, list)
        or (isinstance(groups, int) and groups >= 0)
    ):
        raise TowerError(
            f"groups is {groups!r}: give a number of groups, or a list of "
            "lists of variables."
        )
