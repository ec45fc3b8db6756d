"""A worker of an elastic job; says at every batch who takes part.

argv: a folder, and the epoch and batch in which the worker that finds the
folder's file ``victim`` free kills itself.
"""

import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_towers as kt
from keras_towers import elastic

FOLDER = pathlib.Path(sys.argv[1])
UPDATES = os.environ.get("TESTED_UPDATES")
EPOCHS, BATCH, EVERY = 6, 24, 4
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(480, 8)).astype("float32")
Y = X[:, :3] * 0.5


def build():
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


class Log(keras.callbacks.Callback):
    """Notes what happens, and dies when the time has come."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        strategy = self.strategy
        if strategy.is_chief:
            with (FOLDER / "steps").open("a") as file:
                file.write(f"{self.epoch} {batch} {strategy.size}\n")
        # Slow enough for a new worker to find something left to do.
        if (FOLDER / "died").exists() and self.epoch < EPOCHS - 1:
            time.sleep(0.2)
        if strategy.rank == 1 and (self.epoch, batch) == (1, 13):
            try:
                (FOLDER / "died").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    model = build()
    state = elastic.State(model)

    @elastic.run
    def train(state):
        with kt.HorovodStrategy(updates=UPDATES) as strategy:
            commit = elastic.Commit(state, every=EVERY)
            return model.fit(
                X,
                Y,
                epochs=EPOCHS,
                batch_size=BATCH,
                verbose=0,
                callbacks=[Log(strategy), commit],
            )

    history = train(state)
    reference = build()
    expected = reference.fit(X, Y, epochs=EPOCHS, batch_size=BATCH, verbose=0)
    for one, other in zip(
        model.get_weights(), reference.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert history.epoch == expected.epoch
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
    print(f"as undisturbed, after {history.epoch}", flush=True)


if __name__ == "__main__":
    main()
