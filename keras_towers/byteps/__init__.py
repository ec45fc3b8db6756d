"""``byteps.tensorflow.keras`` and ``byteps.keras`` for Keras 3.

In a script written for BytePS, change only the import:

>>> import keras_towers.byteps as bps
>>> bps.init()
>>> optimizer = bps.DistributedOptimizer(keras.optimizers.Adam(1e-3))

On Keras 3, BytePS's own module does not import. This one has the same names and
semantics, with the code of ``keras_towers.horovod``. Launch: ``keras-towers run
-np 2 --servers 1 train.py``.
"""

from __future__ import annotations

from keras_towers.transport import byteps_start as _start

# If BytePS is missing, says what to do before the import below fails.
_start.load()

from byteps.tensorflow import (  # noqa: E402
    Compression,
    local_rank,
    local_size,
    rank,
    size,
)

from keras_towers.byteps import callbacks  # noqa: E402
from keras_towers.byteps.functions import (  # noqa: E402  # noqa: E402
    DistributedOptimizer,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    init,
    load_model,
    push_pull,
    shutdown,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "init",
    "load_model",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "shutdown",
    "size",
]
