"""Drop-in for ``byteps.tensorflow.keras`` and ``byteps.keras`` on Keras 3.

Where keras_towers has been imported, as under ``keras-towers run``, the imports
of these modules give this one:

>>> import byteps.tensorflow.keras as bps
>>> bps.init()
>>> optimizer = bps.DistributedOptimizer(keras.optimizers.Adam(1e-3))

On Keras 3, BytePS's own module cannot be imported. This one has the same names
and semantics, and shares its code with ``keras_towers.horovod``. Launch:
``keras-towers run -np 2 --servers 1 train.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.engines.byteps.byteps_transport import transport
from keras_towers.foundation.object_types import Variable
from keras_towers.jobs.known_engines import BYTEPS
from keras_towers.reduction.gradients import Gradient

# Raises an error with advice if BytePS is missing, before the import below.
BYTEPS.import_module()

# ``as`` marks names that this module exports.
from byteps.tensorflow import (
    Compression as Compression,
    rank as rank,
    size as size,
)

from keras_towers.engines import dropin
from keras_towers.engines.byteps.bps import callbacks as callbacks
from keras_towers.engines.dropin import distributed_models, use_connection
from keras_towers.engines.dropin.gradient_reducer import Reducer, distribute
from keras_towers.fit.weights import agreement
from keras_towers.fit.weights.copies import native
from keras_towers.reduction.compression_hooks import CommunicationHook
from keras_towers.reduction.gradients import divide
from keras_towers.reduction.rank_sum import sum_over_ranks
from keras_towers.transport import Transport, next_key


def init(lazy: bool = True) -> None:
    """Connect this process to the other ranks, and wait for them.

    Args:
        lazy: ignored: BytePS would connect in the first operation, which cannot
            raise an error.

    Raises:
        TowerError: the variables that describe the job are wrong.
    """
    del lazy
    transport()
    use_connection(transport)
    distributed_models.patch_keras(lambda: True)


# For callbacks in a script that has not called init().
use_connection(transport, as_default=True)


# BytePS itself may count each process as a machine of its own.
def local_rank() -> int:
    """The number of this process on its machine."""
    return transport().local_rank


def local_size() -> int:
    """The number of processes on this machine."""
    return transport().local_size


def shutdown() -> None:
    """Restore Keras; this process leaves the job when it ends."""
    distributed_models.unpatch_keras()


def _compression_hook(compression: dropin.Compression) -> CommunicationHook:
    """Make a communication hook that sends compressed tensors."""

    def hook(
        transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        pairs = [compression.compress(tensor) for tensor in tensors]
        totals = transport.all_reduce([small for small, _ in pairs], key)
        return [
            compression.decompress(total, context)
            for total, (_, context) in zip(totals, pairs, strict=True)
        ]

    return hook


def push_pull(
    value: Any,
    scope: str = "",
    average: bool = True,
    compression: dropin.Compression = Compression.none,
    name: str | None = None,
) -> tf.Tensor:
    """Combine a value of the same shape on all ranks.

    In BytePS, each call without a name gets a random one, which works only for
    a single worker, and reusing a name at once may give a wrong sum. Here both
    are safe.

    Args:
        value: a tensor, variable, array or number, or ``tf.IndexedSlices``,
            which become dense.
        scope: put before the name.
        average: whether to return the mean over the ranks instead of the sum.
        compression: how the value is sent: ``bps.Compression.none`` or
            ``bps.Compression.fp16``.
        name: the name of the operation, the same on all ranks.

    Returns:
        A tensor with the shape and dtype of the value.
    """
    dropin.check_compression(compression, "bps")
    tensor = tf.convert_to_tensor(value)
    hook = _compression_hook(compression)
    key = _key(scope, name, "push_pull")
    (total,) = hook(transport(), [tensor], key)
    if not average:
        return total
    mean = tf.math.divide(total, size())
    return tf.cast(mean, tensor.dtype)


def _key(scope: str, name: str | None, purpose: str) -> str:
    """The key of a collective, from its name or a number."""
    key = f"{scope}{name}" if scope or name else next_key(purpose)
    return f"bps.{key}"


def broadcast(
    value: Any, root_rank: int, scope: str = "", name: str | None = None
) -> tf.Tensor:
    """Send the value of one rank to all ranks.

    Args:
        value: as in ``push_pull``.
        root_rank: the rank whose value is sent.
        scope: put before the name.
        name: the name of the operation, the same on all ranks.

    Returns:
        The value of rank ``root_rank``, bit for bit.
    """
    key = _key(scope, name, "broadcast")
    tensor = tf.convert_to_tensor(value)
    return transport().broadcast([tensor], key, root_rank)[0]


def broadcast_variables(
    variables: Iterable[Variable], root_rank: int, scope: str = ""
) -> None:
    """Set variables to their values on one rank.

    Args:
        variables: Keras or TensorFlow variables, in the same order on all
            ranks.
        root_rank: the rank whose values are used.
        scope: ignored: names that match on all ranks are chosen.
    """
    del scope
    values = list(map(native, variables))
    agreement.broadcast(transport(), values, root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no global variables.

    Args:
        root_rank: the rank whose values were wanted.

    Raises:
        TowerError: always.
    """
    dropin.refuse_global_variables("bps", root_rank)


class _MeanReducer(Reducer):
    """Averages gradients over the ranks."""

    module = "bps"

    def __init__(self, compression: dropin.Compression, sparse_as_dense: bool):
        super().__init__(sparse_as_dense)
        self._hook = _compression_hook(compression)

    def transport(self) -> Transport:
        return transport()

    def reduce_groups(
        self, grads: list[Gradient], groups: list[list[int]], key: str
    ) -> list[Gradient]:
        # BytePS decides what it sends together.
        totals = sum_over_ranks(
            transport(), grads, self._hook, f"bps.gradients.{key}"
        )
        return [divide(total, size()) for total in totals]


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: dropin.Compression = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
) -> keras.optimizers.Optimizer:
    """Make an optimizer average its gradients over all ranks before it updates.

    As in ``keras_towers.horovod.DistributedOptimizer``, the optimizer itself is
    modified and returned.

    Args:
        optimizer: any optimizer of Keras 3, possibly a ``LossScaleOptimizer``.
        name: ignored: names that match on all ranks are chosen.
        device_dense: ignored: BytePS sums on its servers.
        device_sparse: ignored, too.
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
    dropin.check_compression(compression, "bps")
    reducer = _MeanReducer(compression, sparse_as_dense)
    distribute(optimizer, reducer, backward_passes_per_step)
    # A script may not have called it, and ``compile`` has to be patched.
    init()
    return optimizer


def load_model(
    filepath: object,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, object] | None = None,
    compression: dropin.Compression = Compression.none,
) -> keras.Model:
    """Load a model and make its optimizer a distributed one.

    Like ``keras_towers.horovod.load_model``, with the same arguments.
    """
    return distributed_models.load_model(
        functools.partial(DistributedOptimizer, compression=compression),
        filepath,
        custom_optimizers,
        custom_objects,
    )
