"""A task of a job that loses some: trains slowly, and reports its progress.

``main`` is given the strategy, its options, the epochs of each ``fit``, and may
be given the number of models, the seconds that a batch takes, which rank waits
in an epoch to be killed, after how many steps the task kills itself, or before
it knows that they have ended, a backup's kind and folder, and how much later
others than the chief write it.
"""

import json
import os
import signal
import time

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers.foundation import settings
from keras_towers.parameter_servers import worker_fit

X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
KILLED_IN = 3


class Report(keras.callbacks.Callback):
    """Reports epochs and steps, and takes its time for them."""

    def __init__(self, pause_s=0.0, waits=False, dies_after=0):
        super().__init__()
        self._pause_s, self._waits = pause_s, waits
        self._steps_to_live = dies_after

    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch)
        if self._waits and epoch == KILLED_IN:
            time.sleep(600)

    def on_train_batch_end(self, batch, logs=None):
        print("step", int(self.model.optimizer.iterations))
        self._steps_to_live -= 1
        if self._steps_to_live == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._pause_s)


def die_within(steps):
    """Die when a step has been run, but before this process knows so."""
    original, left = worker_fit.WorkerFit._end_step, [steps]

    def end_step(self):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    worker_fit.WorkerFit._end_step = end_step


def make(backup=None):
    keras.utils.set_random_seed(3)
    # Keras's own backup does not have the states of random layers.
    rate = 0 if backup == "keras" else 0.2
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((8,)), layers.Dropout(rate), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


def train(model, fits, callbacks=(), shuffle=True):
    """Train for some epochs, again and again; in order with a backup."""
    for number, epochs in enumerate(fits):
        print("fit of", epochs)
        model.fit(
            X,
            X[:, :1],
            8,
            initial_epoch=number,
            epochs=number + epochs,
            shuffle=shuffle,
            verbose=0,
            callbacks=list(callbacks),
        )
    return model


def main(
    strategy,
    options,
    fits,
    models=1,
    backup=None,
    folder="",
    late_s=0,
    dies_within=0,
    waits=None,
    **reported,
):
    """Run as a task of the job."""
    settings.LOST_S, settings.CHIEF_LOST_S = 6.0, 12.0
    settings.ANSWER_S = 5.0
    die_within(dies_within)
    # The server's devices are no towers of this process.
    kt.virtual_towers(2)
    strategy = getattr(kt, strategy)(**{"towers": 1, **options})
    backups = {
        "keras": lambda: [keras.callbacks.BackupAndRestore(folder)],
        "towers": lambda: [kt.Backup(folder)],
        None: list,
    }[backup]
    try:
        with strategy:
            for number in range(models):
                print("model", number)
                model = make(backup)
                late = keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda *_: time.sleep(late_s)
                )
                report = Report(waits=waits == strategy.rank, **reported)
                callbacks = [*backups(), report]
                if not strategy.is_chief:
                    callbacks.insert(0, late)
                train(model, fits, callbacks, shuffle=not backup)
    except tf.errors.UnavailableError as error:
        print("cause", error)
        print("lost:", *error.__notes__)
        print("evaluated", model.evaluate(X, X[:, :1], verbose=0))
    else:
        print("counts", getattr(strategy, "counts", None))
        print("values", json.dumps([w.tolist() for w in model.get_weights()]))
