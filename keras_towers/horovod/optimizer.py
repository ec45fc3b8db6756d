"""``DistributedOptimizer`` and ``PartialDistributedOptimizer``."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras

from keras_towers.dropin import wrapping
from keras_towers.dropin.arguments import check_optimizer, passes_of
from keras_towers.horovod import compiling
from keras_towers.horovod.options import checked, layers_in
from keras_towers.horovod.reducer import GradientReducer


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
            ``LossScaleOptimizer``; if ``compile`` adds one, that is handled.
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
    check_optimizer(optimizer, "hvd")
    options = checked(
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
    passes = passes_of(backward_passes_per_step, average_aggregated_gradients)
    # Horovod's own init may have been called instead of this package's.
    compiling.prepare_process()
    reducer = GradientReducer(options)
    wrapping.wrap(optimizer, wrapping.Distribution(reducer, passes))
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
    state = wrapping.distribution_of(optimizer)
    assert state is not None
    state.reducer.local_layers += layers
    return optimizer
