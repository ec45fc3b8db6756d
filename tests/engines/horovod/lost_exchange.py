"""A script: rank 1 fails while rank 0 begins an exchange, which is lost.

Rank 0 has seen that Horovod runs, and adds to its queue when it has shut down.
"""

import ctypes
import threading

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.engines.horovod import horovod_transport
from keras_towers.jobs.rendezvous import store
from tests.kit.processes import wait_until

PRELOADED = ctypes.CDLL(None)
# Of the locks that a thread takes for a gather: that of the queue.
QUEUE = 3
JOB = store.store_of_job()


def has_shut_down():
    """Horovod closes its connections last."""
    ends = map(horovod_transport._both_ends, horovod_transport._connections())
    return horovod_transport._links.isdisjoint(ends)


def release():
    assert wait_until(PRELOADED.is_held)
    JOB.put("held", True)
    wait_until(has_shut_down)
    PRELOADED.release()


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if RANK == 1:
            JOB.wait("held", 60)
            raise ValueError("my bug")
        threading.Thread(target=release).start()
        transport = strategy._config.transport
        all_gather = transport.all_gather

        def held(*args):
            transport.all_gather = all_gather
            PRELOADED.hold_at_lock(QUEUE)
            return all_gather(*args)

        # The thread that waits is another one than this.
        transport.all_gather = held


model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones([8, 2]), np.ones([8, 1])
with kt.HorovodStrategy() as strategy:
    RANK = strategy._config.transport.rank
    failed = "" if RANK else "ended on rank 0, because it failed on rank 1.*"
    with pytest.raises((ValueError, kt.TowerError), match=f"{failed}my bug"):
        model.fit(x, y, verbose=0, callbacks=[Fails()])
    assert PRELOADED.is_held() == (RANK == 0)
    model.fit(x, y, verbose=0)
