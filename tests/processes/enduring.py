"""A rank of a job that goes on after rank 1 has killed itself.

argv: a folder, a strategy, ``elastic`` for ``kt.elastic`` in place of
``kt.Backup``, and ``mesh`` for a mesh in each process. Rank 0 leaves a line in
the folder's file ``steps`` for every batch: the epoch, the batch and the number
of ranks. With a file ``victim`` rank 1 kills itself in batch 13 of the second
epoch, and the others of an elastic job take longer until there are three again.
Who gets to the end compares with one process.
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
from tests.kit.meshes import layout_map, mesh_of

FOLDER = pathlib.Path(sys.argv[1])
STRATEGY = sys.argv[2]
ELASTIC = "elastic" in sys.argv
ON_MESH = "mesh" in sys.argv
# Those that are left are to be at work still when another one has started.
LONELY_S = 1.0
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(480, 8)).astype("float32")
Y = X[:, :4] * 0.5


def build():
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.005, momentum=0.5)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, **options):
    return model.fit(X, Y, 24, epochs=4, verbose=0, **options)


def strategy_here():
    """Each process has two towers of two devices, which share the kernel."""
    if not ON_MESH:
        return kt.strategy(STRATEGY)
    layouts = layout_map(mesh_of(2, 2), {".*kernel": ("batch", "model")})
    return kt.strategy(STRATEGY, layouts=layouts, shard_over="process")


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
        if ELASTIC and (FOLDER / "killed").exists() and self.strategy.size < 3:
            time.sleep(LONELY_S)
        if self.strategy.rank == 1 and (self.epoch, batch) == (1, 13):
            try:
                (FOLDER / "victim").unlink()
            except FileNotFoundError:
                return
            (FOLDER / "killed").write_text("leaves")
            os.kill(os.getpid(), signal.SIGKILL)


def fit_elastically(model):
    state = kt.elastic.State(model, starts=0)

    @kt.elastic.run
    def train(state):
        # As often as there has been a commit before.
        assert state.starts <= 3 and bool(state.starts) == (state.epoch > 0)
        state.starts += 1
        with strategy_here() as strategy:
            commit = kt.elastic.Commit(state, every=4)
            return fit(model, callbacks=[Log(strategy), commit])

    return train(state)


def fit_again(model):
    with strategy_here() as strategy:
        backup = kt.Backup(FOLDER / "backup", every=4)
        return fit(model, callbacks=[Log(strategy), backup])


def main():
    if ON_MESH:
        kt.virtual_towers(4)
    model = build()
    history = fit_elastically(model) if ELASTIC else fit_again(model)
    alone = build()
    wanted = fit(alone)
    assert_all_close(model.weights, alone.weights, 1e-5)
    assert history.epoch == wanted.epoch
    assert_same_history(history.history, wanted.history, 1e-4)
    print("as undisturbed", flush=True)


if __name__ == "__main__":
    main()
