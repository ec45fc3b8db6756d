"""``DistributedOptimizer``: an optimizer that averages gradients over ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import byteps.tensorflow as bps
import keras

from keras_towers.byteps.functions import compressed_sums, init, transport
from keras_towers.dropin import check_compression, models
from keras_towers.dropin.optimizer import Reducer, distribute
from keras_towers.reduction import divided, sum_over_ranks


class _Mean(Reducer):
    """The mean of gradients over the ranks."""

    called = "bps"

    def __init__(self, compression: Any, sparse_as_dense: bool):
        super().__init__(sparse_as_dense)
        self._hook = compressed_sums(compression)

    def communicates(self) -> bool:
        return bool(bps.size() > 1)

    def reduce_shared(
        self, grads: list[Any], variables: list[Any], indices: list[int]
    ) -> list[Any]:
        totals = sum_over_ranks(transport(), grads, self._hook)
        return [divided(total, bps.size()) for total in totals]


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = bps.Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
) -> keras.optimizers.Optimizer:
    """Make an optimizer average its gradients over all ranks before it updates.

    As ``keras_towers.horovod.DistributedOptimizer``, the optimizer itself is
    modified and returned.

    Args:
        optimizer: any optimizer of Keras 3, possibly a ``LossScaleOptimizer``.
        name: ignored: names are chosen so that ranks have the same.
        device_dense: ignored: BytePS sums on its servers.
        device_sparse: likewise.
        compression: how dense gradients are sent: ``bps.Compression.none`` or
            ``bps.Compression.fp16``.
        sparse_as_dense: send sparse gradients as dense ones.
        backward_passes_per_step: the number of calls whose gradients are summed
            for one update; only updates communicate.

    Returns:
        The optimizer.

    Raises:
        TowerError: an argument is invalid, or the optimizer is distributed
            already.
    """
    del name, device_dense, device_sparse
    check_compression(compression, "bps")
    reducer = _Mean(compression, sparse_as_dense)
    distribute(optimizer, reducer, backward_passes_per_step)
    # What a script may have left out, and ``compile`` needs.
    init()
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = bps.Compression.none,
) -> keras.Model:
    """Load a model and make its optimizer a distributed one.

    Args:
        filepath: a ``.keras`` or ``.h5`` file of any Keras 3 model.
        custom_optimizers: optimizer classes that are not part of Keras.
        custom_objects: objects by name, as for ``keras.models.load_model``.
        compression: as for ``DistributedOptimizer``.

    Returns:
        The model.
    """
    return models.load_model(
        functools.partial(DistributedOptimizer, compression=compression),
        filepath,
        custom_optimizers,
        custom_objects,
    )
