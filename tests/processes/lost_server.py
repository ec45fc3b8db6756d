"""A worker or server of a job that is started again with its backups.

argv: the kind of backup, its folder, and the seconds that a batch takes. With
no kind of backup four models are trained, one after another.
"""

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_towers as kt


def trained(callbacks):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((8,)), *layers])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
    model.fit(
        *(x, x[:, :1], 8, 8), shuffle=False, verbose=0, callbacks=callbacks
    )
    return model.get_weights()


class Slow(keras.callbacks.Callback):
    """Tells of each epoch, and takes its time for each batch."""

    def __init__(self, pause_s):
        super().__init__()
        self._pause_s = pause_s

    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self._pause_s)


def main():
    """Run as a task of the job."""
    kind, folder, pause_s = sys.argv[1:]
    strategy = kt.SyncReplicasStrategy()
    backups = {
        "keras": lambda: [keras.callbacks.BackupAndRestore(folder)],
        "towers": lambda: [kt.Backup(folder)],
        "none": list,
    }[kind]
    try:
        with strategy:
            for number in range(4 if kind == "none" else 1):
                print("fit", number)
                weights = trained([*backups(), Slow(float(pause_s))])
    except kt.TowerError as error:
        print(f"refused at {time.time()}: {error}")
        raise
    print("weights", [w.tolist() for w in weights])
