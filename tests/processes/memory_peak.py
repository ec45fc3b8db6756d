"""What a rank has at its peak, relative to a model's weights and slots.

Its own numbers: the state, by sizes and not by variables.

Arguments:
    how: ``whole`` or ``sharded``.
    folder: that of a backup, from which training goes on; empty: none.
    limit: the most memory that the model may take, after whose first backup
        rank 0 is killed; 0: any.
"""

import os
import resource
import signal
import sys

import keras
import numpy as np

import keras_towers as kt
from keras_towers.foundation.system import resident_bytes
from keras_towers.inspection.bench.cell_process import (
    peak_memory,
    reset_peak_memory,
)

HOW, FOLDER, LIMIT = sys.argv[1], sys.argv[2], float(sys.argv[3])
WIDTH, LAYERS = 1024, 24
STATE_MB = 3 * 4 * WIDTH**2 * LAYERS / 1e6


def compiled(width, layers):
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [keras.Input((width,))]
        + [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    )
    # A compiler's threads would count as memory.
    made.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
    return made


def train(model, width, **options):
    x = np.random.RandomState(0).rand(16, width).astype("float32")
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0, **options)


def say(name, *values):
    if strategy.rank == 0:
        print(name, *values, flush=True)


def say_peak(name):
    say(name, (peak_memory() - before) / STATE_MB)


class Watched(keras.callbacks.Callback):
    """Counts batches, and may kill rank 0 once a batch is saved."""

    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if LIMIT:
            say_peak("peak")
            if strategy.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)


options = {"weights": "sharded", "gather_bytes": "16MiB"}
if HOW == "whole":
    options = {}
strategy = kt.HorovodStrategy(towers=1, **options)
callbacks = [kt.Backup(FOLDER, every=1)] if FOLDER else []
watched = Watched()
callbacks.append(kt.EveryRank(watched))
with strategy:
    # What a process has with any model: what kernels and messages need.
    train(compiled(WIDTH, 1), WIDTH)
    if LIMIT:
        most = resident_bytes("VmData") + int(LIMIT * STATE_MB * 1e6)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    before = reset_peak_memory()
    model = compiled(WIDTH, LAYERS)
    say_peak("made")
    train(model, WIDTH, epochs=2, callbacks=callbacks)
    say_peak("peak")
    described = strategy.describe()
    state = (*model.weights, *model.optimizer.variables)
    say("sums", *(np.abs(v.numpy()).sum(dtype="float64") for v in state))
assert "the peak memory of this process is" in described, described
say("batches", watched.batches)
