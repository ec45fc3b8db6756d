"""``horovod.keras``, ``.tensorflow.keras`` and ``.tensorflow`` for Keras 3.

In a script written for Horovod, change only the import:

>>> import keras_towers.horovod as hvd
>>> hvd.init()
>>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))

On Keras 3, Horovod's own module runs without an error but reduces no gradients.
This one has the same names and semantics; differences are documented where they
occur. Launch as usual: ``horovodrun -np 4 python train.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

# What is done on the import of Keras needs the whole of transport.
import keras as _keras  # noqa: F401

from keras_towers.transport import horovod as _transport

# If Horovod is missing, says what to do before the imports below fail.
_transport.load()

from horovod.tensorflow import (  # noqa: E402
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    remove_process_set,
    rocm_built,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)

from keras_towers.horovod import callbacks, elastic, other_names  # noqa: E402
from keras_towers.horovod.functions import (  # noqa: E402
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    join,
    reducescatter,
    shutdown,
)
from keras_towers.horovod.optimizer import (  # noqa: E402
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from keras_towers.horovod.sync_batch_norm import (  # noqa: E402
    SyncBatchNormalization,
)
from keras_towers.horovod.tape import (  # noqa: E402
    DistributedGradientTape,
    PartialDistributedGradientTape,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Say what to use instead of a name that is Horovod's only."""
        other_names.refuse(__name__, name)
