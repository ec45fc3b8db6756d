"""A worker whose rank 1 fails in its third step, in the way argv names.

argv: the fault, and what ranks train with: a strategy's name, or ``dropin``.
Each process notes its number in the file ``processes``.
"""

import contextlib
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers import horovod as hvd
from tests.kit.ranks import rank_here
from tests.processes.small import exchange_without_memory

FAULT, HOW = sys.argv[1:3]
RANK = rank_here()


class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == 1 and batch == 2:
            print("here it comes", flush=True)
            if FAULT == "sleep":
                time.sleep(600)
            if FAULT == "end":
                os._exit(0)
            if FAULT == "exit":
                sys.exit(3)
            if FAULT == "hold":
                while not os.path.exists("go on"):
                    time.sleep(0.1)
                return
            os.kill(os.getpid(), getattr(signal, FAULT))


def finite(y, prediction):
    y = tf.debugging.check_numerics(y, "a label is wrong")
    return keras.losses.mean_squared_error(y, prediction)


with open("processes", "a") as file:
    print(os.getpid(), file=file)
if FAULT == "late" and RANK == 1:
    time.sleep(600)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
together = contextlib.nullcontext
optimizer = keras.optimizers.SGD(0.01)
if HOW == "dropin":
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer)
else:
    together = getattr(kt, HOW)
model.compile(optimizer, finite)
x = np.ones((4000, 4), "float32")
if FAULT == "memory":
    # Outside of any call.
    with together() as strategy:
        exchange_without_memory(strategy._config.transport, "all_gather")
callbacks = [Fault()]
if FAULT == "error":
    x[11], callbacks = np.inf, []
with together():
    if FAULT == "folder":
        time.sleep(2 * RANK)
        os.makedirs("runs")
    model.fit(
        x, x[:, :2], batch_size=4, verbose=0, shuffle=False, callbacks=callbacks
    )
print("trained to the end", flush=True)
