"""``byteps.tensorflow.keras`` and ``byteps.keras`` for Keras 3.

In a script written for BytePS, change only the import:

>>> from keras_towers import byteps as bps
>>> bps.init()
>>> optimizer = bps.DistributedOptimizer(keras.optimizers.Adam(1e-3))

On Keras 3, BytePS's own module does not import. This one has the same names and
semantics, with the code of ``keras_towers.horovod``. Launch: ``keras-towers run
-np 2 --servers 1 train.py``.
"""

from __future__ import annotations

from keras_towers.engines.byteps import byteps_transport as _transport

# If BytePS is missing, says what to do before the import below fails.
_transport.load()

# ``as`` makes a name one of this module's own.
from byteps.tensorflow import (
    Compression as Compression,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    size as size,
)

from keras_towers.engines.byteps.bps import callbacks as callbacks
from keras_towers.engines.byteps.bps.functions import (
    DistributedOptimizer as DistributedOptimizer,
    broadcast as broadcast,
    broadcast_global_variables as broadcast_global_variables,
    broadcast_variables as broadcast_variables,
    init as init,
    load_model as load_model,
    push_pull as push_pull,
    shutdown as shutdown,
)
