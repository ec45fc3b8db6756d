"""``horovod.keras`` and ``horovod.tensorflow.keras`` for Keras 3.

In a script written for Horovod, change only the import:

>>> import keras_towers.horovod as hvd
>>> hvd.init()
>>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))

On Keras 3, Horovod's own module runs without an error but reduces no gradients.
This one has the same names and semantics; differences are documented where they
occur. Launch as usual: ``horovodrun -np 4 python train.py``.
"""

from __future__ import annotations

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
    allgather_object,
    broadcast_object,
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
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)

from keras_towers.horovod import callbacks  # noqa: E402
from keras_towers.horovod.compiling import init, shutdown  # noqa: E402
from keras_towers.horovod.functions import (  # noqa: E402
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from keras_towers.horovod.optimizer import (  # noqa: E402
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from keras_towers.horovod.saving import load_model  # noqa: E402

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
