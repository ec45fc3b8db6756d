"""Checks of a worker: which ranks run which of Keras's callbacks."""

import contextlib
import functools
import pathlib
import sys
import types
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.weights import shards
from keras_towers.foundation import compat
from tests.docs.pages import callbacks_by_rank
from tests.kit.compare import assert_all_close
from tests.kit.ranks import check
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1])
# The models are small.
shards.SMALLEST_BYTES = 1
HAS_ORBAX = compat.KERAS >= (3, 14)


class Checkpointer:
    """Writes as Orbax's does: beside the checkpoint, and then renames it."""

    def __init__(self, directory, **policies):
        self._directory = pathlib.Path(directory)

    def save_checkpointables(self, step, payload):
        partial = self._directory / f"{step}.orbax-checkpoint-tmp"
        partial.mkdir(parents=True)
        np.savez(partial / "state.npz", *tf.nest.flatten(payload["pytree"]))
        partial.rename(self._directory / str(step))

    def close(self):
        pass


@contextlib.contextmanager
def orbax():
    """Let Keras's callback write by the class above."""
    space = types.SimpleNamespace
    stand_in = space(
        initialize=lambda: None,
        Context=contextlib.nullcontext,
        training=space(
            Checkpointer=Checkpointer,
            preservation_policies=space(LatestN=int),
            save_decision_policies=space(FixedIntervalPolicy=int),
        ),
    )
    if not HAS_ORBAX:
        yield
        return
    module = sys.modules[keras.callbacks.OrbaxCheckpoint.__module__]
    with unittest.mock.patch.object(module, "ocp", stand_in):
        yield


GIVEN = {
    "BackupAndRestore": lambda of: of(FOLDER / "of-keras"),
    "CSVLogger": lambda of: of(FOLDER / "log.csv"),
    "EarlyStopping": lambda of: of("loss"),
    "LearningRateScheduler": lambda of: of(lambda epoch: 0.1),
    "ModelCheckpoint": lambda of: of(FOLDER / "model.keras"),
    "OrbaxCheckpoint": lambda of: of(FOLDER / "orbax"),
    "ReduceLROnPlateau": lambda of: of("loss"),
    "TensorBoard": lambda of: of(FOLDER / "board"),
}


@check
def each_callback_of_keras_runs_where_the_table_says():
    ran = set()

    def noting(name):
        def note(self, epoch, logs=None):
            ran.add(name)

        kind = getattr(keras.callbacks, name)
        of = type(name, (kind,), {"on_epoch_end": note})
        return GIVEN.get(name, lambda of: of())(of)

    table = callbacks_by_rank()
    if not HAS_ORBAX:
        del table["OrbaxCheckpoint"]
    mine = s.eager(optimizer=keras.optimizers.SGD(0.1, use_ema=True))
    with orbax(), s.Strategy():
        s.fit(mine, callbacks=[noting(name) for name in table])
    on_all = {name for name, ranks in table.items() if ranks == "every rank"}
    assert ran == (on_all if s.RANK else table.keys()), ran


@check
def checkpoints_of_orbax_are_written_by_one_and_others_by_their_rank():
    """With whole weights, at the end of an epoch and within one."""
    if not HAS_ORBAX:
        return

    def train(together, frequencies):
        saves = functools.partial(
            keras.callbacks.OrbaxCheckpoint,
            save_on_background=False,
            max_to_keep=None,
        )
        with orbax(), together:
            given = [
                saves(folder, save_freq=often)
                for folder, often in frequencies.items()
            ]
            mine = s.model(optimizer="adam")
            s.fit(mine, batch_size=25, epochs=2, callbacks=given)

    common, own = FOLDER / "orbax-of-all", FOLDER / f"orbax-of-{s.RANK}"
    train(s.Strategy(weights="sharded"), {common: "epoch", own: 2})
    alone, within = FOLDER / "orbax-alone", FOLDER / "orbax-alone-within"
    if s.RANK == 0:
        train(contextlib.nullcontext(), {alone: "epoch", within: 2})
    s.gather("all have written")
    for found, wanted, steps in (common, alone, "01"), (own, within, "24"):
        assert sorted(path.name for path in found.iterdir()) == [*steps]
        for step in steps:
            assert_all_close(_read(found / step), _read(wanted / step), 1e-5)


def _read(checkpoint):
    with np.load(checkpoint / "state.npz") as file:
        return [*dict(file).values()]
