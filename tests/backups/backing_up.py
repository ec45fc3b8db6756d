"""Training that backs up, is ended, and goes on as in a new process."""

import itertools
import os
import signal

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.backups.backup_folder import CallFolder
from keras_towers.backups.saved_training import SavedTraining
from keras_towers.fit.weights import checkpoint
from keras_towers.transport import SingleProcess
from tests.kit.again import begin_again
from tests.kit.compare import assert_all_close, assert_same_history

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X @ np.ones((3, 1), "float32")
# Towers' statistics are averaged sooner, which rounds otherwise.
TOLERANCE = 1e-5


def model(units=1, normalize=True):
    keras.utils.set_random_seed(1)
    first = [keras.Input((3,)), keras.layers.Dropout(0.3)]
    if normalize:
        first.append(keras.layers.BatchNormalization())
    built = keras.Sequential([*first, keras.layers.Dense(units)])
    built.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return built


def ends(epoch, batch, act):
    """A callback that does something behind a batch."""
    at = keras.callbacks.Callback()
    at.on_epoch_begin = lambda number, logs=None: setattr(at, "epoch", number)
    at.on_train_batch_end = lambda number, logs=None: (
        act() if (at.epoch, number) == (epoch, batch) else None
    )
    return at


def kill(number):
    return lambda: os.kill(os.getpid(), number)


def train(
    last,
    *callbacks,
    made=None,
    towers=2,
    data=(X, Y, 5),
    weights=None,
    **options,
):
    made = made or model()
    # A backup has the mean of all towers' statistics all the same.
    with kt.TowerStrategy(towers, sync_every_epoch=False, weights=weights):
        history = made.fit(
            *data, epochs=3, verbose=0, callbacks=[*callbacks, last], **options
        )
    return made, history


def interrupted(last, epoch, batch, number=signal.SIGTERM, **options):
    """Train until a signal; what follows is as in a new process."""
    with pytest.raises(SystemExit) as ended:
        train(last, ends(epoch, batch, kill(number)), **options)
    assert ended.value.code == 75
    begin_again()


def assert_equal(one, other):
    assert_all_close(one[0].weights, other[0].weights, TOLERANCE)
    assert_same_history(one[1].history, other[1].history, TOLERANCE)
    assert one[1].epoch == other[1].epoch


def same_everywhere(value):
    """A model all of whose weights have one value."""
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.compile(keras.optimizers.Adam(0.1), "mse")
    made.optimizer.build(made.trainable_variables)
    made.set_weights([np.full(w.shape, value) for w in made.get_weights()])
    return made


def opened(folder, made):
    """What goes on with the last backup of a folder, in a new process."""
    begin_again()
    saved = SavedTraining(folder)
    saved.read(SingleProcess(), made, 0)
    saved.attach(made)
    return saved


def commit(saved, made, epoch):
    made.set_weights([np.full(w.shape, epoch) for w in made.get_weights()])
    saved.position.epoch = epoch
    saved.commit()


WRITES = [
    *((checkpoint, name) for name in ("write", "merge")),
    *((CallFolder, name) for name in ("_write", "_sync", "_rename", "_remove")),
]


def failing_at(patch, number, error):
    """Let a write fail, by its number, before or after it had its effect."""
    done = itertools.count()

    def fails(original, *arguments):
        if next(done) == number:
            raise error
        original(*arguments)
        if next(done) == number:
            raise error

    for owner, name in WRITES:
        original = getattr(owner, name)
        patch.setattr(*(owner, name), lambda *its, of=original: fails(of, *its))
