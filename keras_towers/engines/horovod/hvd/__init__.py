"""Drop-in for Horovod's modules for Keras and TensorFlow, on Keras 3.

Where keras_towers has been imported, as under ``keras-towers run``, the imports
of ``horovod.keras`` and ``horovod.tensorflow.keras`` give this module:

>>> import horovod.keras as hvd
>>> hvd.init()
>>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))

On Keras 3, Horovod's own module runs without an error but reduces no gradients.
This one has the same names and semantics, also those of ``horovod.tensorflow``;
differences are documented where they occur.

``distributed_optimizers``
  Optimizers and tapes that reduce their gradients over Horovod's ranks.
``elastic_states``
  ``hvd.elastic``: training that goes on when processes are lost or join.
``operations``
  Horovod's operations on tensors, Keras variables, arrays and numbers.
"""

from __future__ import annotations

# First: importing Keras runs hooks of this package, which must not find the
# modules below half imported.
import keras as _keras  # noqa: F401

from keras_towers.jobs.known_engines import HOROVOD as _ENGINE

# Raises an error with advice if Horovod is missing, before the imports below.
_horovod = _ENGINE.import_module()

# ``as`` marks names that this module exports.
from keras_towers.engines.dropin import horovod_callbacks as _callbacks
from keras_towers.engines.horovod.hvd import elastic_states as _elastic
from keras_towers.engines.horovod.hvd.distributed_optimizers import (
    DistributedGradientTape as DistributedGradientTape,
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedGradientTape as PartialDistributedGradientTape,
    PartialDistributedOptimizer as PartialDistributedOptimizer,
    load_model as load_model,
)
from keras_towers.engines.horovod.hvd.operations import (
    SyncBatchNormalization as SyncBatchNormalization,
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

callbacks = _callbacks
elastic = _elastic


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_horovod)})


def __getattr__(name: str) -> object:
    """Look up names in Horovod that need no change for Keras 3."""
    if name == "keras":
        raise AttributeError(
            "hvd.keras is this module itself; for Keras, import keras."
        )
    return getattr(_horovod, name)
