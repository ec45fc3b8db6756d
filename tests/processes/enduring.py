"""A worker of an elastic job, of which one is killed.

argv: a folder. Rank 0 leaves a line in its file ``steps`` for every batch. With
a file ``victim`` rank 1 kills itself in batch 13 of the second epoch, and the
others take longer until there are three again. Who gets to the end compares
with one process, whose weights and losses are kept next to the folder.
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
EPOCHS, UNITS = 4, 16
UPDATES = os.environ.get("TESTED_UPDATES")
BATCH, LONELY_S = 24, 0.5
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(480, 8)).astype("float32")
Y = X[:, :3] * 0.5


def build():
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(UNITS, "relu"),
            keras.layers.Dense(UNITS, "relu"),
            keras.layers.Dense(3),
        ]
    )
    optimizer = keras.optimizers.SGD(0.005, momentum=0.5)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, **options):
    return model.fit(X, Y, BATCH, EPOCHS, verbose=0, **options)


class Log(keras.callbacks.Callback):
    """Tells of steps, of which rank 1 does not survive one."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.strategy.is_chief:
            with (FOLDER / "steps").open("a") as file:
                file.write(f"{self.epoch} {batch} {self.strategy.size}\n")
        if (FOLDER / "killed").exists() and self.strategy.size < 3:
            time.sleep(LONELY_S)
        if self.strategy.rank == 1 and (self.epoch, batch) == (1, 13):
            try:
                (FOLDER / "victim").rename(FOLDER / "killed")
            except FileNotFoundError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    model = build()
    state = elastic.State(model)

    @elastic.run
    def train(state):
        with kt.HorovodStrategy(updates=UPDATES) as strategy:
            commit = elastic.Commit(state, every=4)
            return fit(model, callbacks=[Log(strategy), commit])

    history = train(state)
    *weights, losses, errors = undisturbed()
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert history.epoch == list(range(EPOCHS))
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(history.history["mae"], errors, rtol=1e-4)
    print(f"as undisturbed after {len(history.epoch)} epochs", flush=True)


def undisturbed():
    """The weights and losses after the same training in one process."""
    kept = FOLDER.parent / "undisturbed.npz"
    if not kept.exists():
        model = build()
        history = fit(model).history
        new = kept.with_suffix(f".{os.getpid()}.npz")
        np.savez(new, *model.get_weights(), history["loss"], history["mae"])
        new.rename(kept)
    with np.load(kept) as file:
        return list(file.values())


if __name__ == "__main__":
    main()
