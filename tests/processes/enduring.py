"""A worker of a job that goes on after rank 1 has killed itself.

argv: a folder, and the strategy of a job that is started again from a backup;
without one, the job is elastic. Rank 0 leaves a line in its file ``steps`` for
every batch: the epoch, the batch and the number of ranks. With a file
``victim`` rank 1 kills itself in batch 13 of the second epoch, and the others
of an elastic job take longer until there are three again. Who gets to the end
compares with one process.
"""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np

import keras_towers as kt
from tests.kit.compare import assert_all_close, assert_same_history

FOLDER = pathlib.Path(sys.argv[1])
UPDATES = os.environ.get("TESTED_UPDATES")
# Those that are left are to be at work still when another one has started.
LONELY_S = 1.0
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(480, 8)).astype("float32")
Y = X[:, :3] * 0.5


def build():
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.005, momentum=0.5)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, **options):
    return model.fit(X, Y, 24, epochs=4, verbose=0, **options)


class Log(keras.callbacks.Callback):
    """Says that this worker trains, or ends it."""

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


def fit_elastically(model):
    from keras_towers import elastic

    state = elastic.State(model)

    @elastic.run
    def train(state):
        with kt.HorovodStrategy(updates=UPDATES) as strategy:
            commit = elastic.Commit(state, every=4)
            return fit(model, callbacks=[Log(strategy), commit])

    return train(state)


def fit_again(model, name):
    options = {"updates": UPDATES} if UPDATES else {}
    with kt.strategy(name, **options) as strategy:
        backup = kt.Backup(FOLDER / "backup", every=4)
        return fit(model, callbacks=[Log(strategy), backup])


def main():
    model = build()
    strategy = sys.argv[2:]
    if strategy:
        history = fit_again(model, *strategy)
    else:
        history = fit_elastically(model)
    alone = build()
    wanted = fit(alone)
    assert_all_close(model.weights, alone.weights, 1e-5)
    assert history.epoch == wanted.epoch
    assert_same_history(history.history, wanted.history, 1e-4)
    print("as undisturbed", flush=True)


if __name__ == "__main__":
    main()
