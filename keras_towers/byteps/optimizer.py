"""``DistributedOptimizer``: an optimizer that sums its gradients over ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import byteps.tensorflow as bps
import keras
import tensorflow as tf

from keras_towers.byteps.functions import init, transport
from keras_towers.dropin import saving, wrapping
from keras_towers.dropin.arguments import (
    check_compression,
    check_optimizer,
    passes_of,
)
from keras_towers.dropin.engine import variable_key
from keras_towers.reduction import divided, sum_over_ranks


class _Mean:
    """The mean of gradients over the ranks."""

    called = "bps"

    def __init__(self, compression: Any, sparse_as_dense: bool):
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self.local_keys: set[Any] = set()
        self.local_layers: list[Any] = []

    def reduce(
        self, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        reduced = list(grads)
        if bps.size() == 1:
            return reduced
        chosen = [
            i
            for i, grad in enumerate(grads)
            if grad is not None
            and variable_key(variables[i]) not in self.local_keys
        ]
        small: list[Any] = []
        how: list[Any] = []
        for i in chosen:
            grad = grads[i]
            if isinstance(grad, tf.IndexedSlices) and not self._sparse_as_dense:
                small.append(grad)
                how.append(None)
                continue
            sent, back = self._compression.compress(tf.convert_to_tensor(grad))
            small.append(sent)
            how.append(back)
        totals = sum_over_ranks(transport(), small)
        for i, total, back in zip(chosen, totals, how, strict=True):
            reduced[i] = self._divided(total, back)
        return reduced

    def _divided(self, total: Any, back: Any) -> Any:
        if not isinstance(total, tf.IndexedSlices):
            total = self._compression.decompress(total, back)
        return divided(total, bps.size())


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
    check_optimizer(optimizer, "bps")
    check_compression(compression, "bps")
    passes = passes_of(backward_passes_per_step, average=False)
    # What a script may have left out, and ``compile`` needs.
    init()
    reducer = _Mean(compression, sparse_as_dense)
    wrapping.wrap(optimizer, wrapping.Distribution(reducer, passes))
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
    distribute = functools.partial(
        DistributedOptimizer, compression=compression
    )
    return saving.load_model(
        distribute, filepath, custom_optimizers, custom_objects
    )
