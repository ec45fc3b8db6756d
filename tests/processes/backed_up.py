"""A worker that a signal ends, and that goes on when it is started again."""

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_towers as kt
from tests.processes.small import RANK, X, Y, model

FOLDER = sys.argv[1]


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        with open(f"{FOLDER}/steps", "a") as file:
            file.write("done\n")
        time.sleep(0.05)


mine = model()
with kt.HorovodStrategy():
    history = mine.fit(
        *(X, Y, 4, 3, 0),
        shuffle=False,
        callbacks=[kt.ChiefOnly(Slow()), kt.Backup(f"{FOLDER}/backup")],
    )
if RANK == 0:
    reference = model()
    wanted = reference.fit(X, Y, 4, 3, 0, shuffle=False)
    for a, b in zip(mine.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        history.history["loss"], wanted.history["loss"], rtol=2e-6
    )
    print("as undisturbed", flush=True)
