"""``horovod.keras``, ``.tensorflow.keras`` and ``.tensorflow`` for Keras 3.

In a script written for Horovod, change only the import:

>>> from keras_towers import horovod as hvd
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

from keras_towers.engines.horovod import horovod_transport as _transport

# If Horovod is missing, says what to do before the imports below fail.
_transport.load()

# ``as`` makes a name one of this module's own.
from horovod.tensorflow import (
    Adasum as Adasum,
    Average as Average,
    Compression as Compression,
    Max as Max,
    Min as Min,
    ProcessSet as ProcessSet,
    Product as Product,
    Sum as Sum,
    add_process_set as add_process_set,
    ccl_built as ccl_built,
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    global_process_set as global_process_set,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_rank_op as local_rank_op,
    local_size as local_size,
    local_size_op as local_size_op,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    process_set_included_op as process_set_included_op,
    rank as rank,
    rank_op as rank_op,
    remove_process_set as remove_process_set,
    rocm_built as rocm_built,
    size as size,
    size_op as size_op,
    start_timeline as start_timeline,
    stop_timeline as stop_timeline,
)

from keras_towers.engines.horovod.hvd import callbacks as callbacks
from keras_towers.engines.horovod.hvd import elastic as elastic
from keras_towers.engines.horovod.hvd import other_names
from keras_towers.engines.horovod.hvd.functions import (
    allgather as allgather,
    allgather_object as allgather_object,
    allreduce as allreduce,
    alltoall as alltoall,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_global_variables as broadcast_global_variables,
    broadcast_object as broadcast_object,
    broadcast_variables as broadcast_variables,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
    init as init,
    join as join,
    reducescatter as reducescatter,
    shutdown as shutdown,
)
from keras_towers.engines.horovod.hvd.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedOptimizer as PartialDistributedOptimizer,
    load_model as load_model,
)
from keras_towers.engines.horovod.hvd.sync_batch_norm import (
    SyncBatchNormalization as SyncBatchNormalization,
)
from keras_towers.engines.horovod.hvd.tape import (
    DistributedGradientTape as DistributedGradientTape,
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Say what to use instead of a name that is Horovod's only."""
        other_names.refuse(__name__, name)
