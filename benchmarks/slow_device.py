"""Draw training against wall time, with one of four towers that is slow.

``python -m benchmarks.slow_device async-vs-sync PNG`` draws the loss,
``backup-replicas`` also the global step, without and with a backup replica;
both need scikit-learn and matplotlib, of the extras ``demo`` and ``plots``. The
data are the scanned digits that come with scikit-learn. A layer sleeps as long
as a device might compute, ten times as long on the last tower: so the pictures
do not depend on how many cores share the towers' work.
"""

from __future__ import annotations

import os

# TensorFlow reads these when it is imported, and would fill the screen.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import keras_towers as kt
from keras_towers.cli.installed import describe_machine, machine_facts

TOWERS = 4
DEVICE_S = 0.01
SLOW = 10
BATCH_SIZE = 32
TRAINING_S = 6.0

# A step of synchronous towers trains on as many batches as there are towers.
_SYNCHRONOUS = TOWERS * BATCH_SIZE
_replicas = partial(kt.SyncReplicasStrategy, total_num_replicas=TOWERS)
# A line's title, and what makes its strategy and how large its batches are.
PICTURES: dict[str, dict[str, tuple[Callable[[], Any], int]]] = {
    "async-vs-sync": {
        "AsyncTowerStrategy, does not wait": (
            partial(kt.AsyncTowerStrategy, TOWERS),
            BATCH_SIZE,
        ),
        "TowerStrategy (the default), waits": (
            partial(kt.TowerStrategy, TOWERS),
            _SYNCHRONOUS,
        ),
        "ParameterServerTowerStrategy, waits": (
            partial(kt.ParameterServerTowerStrategy, TOWERS),
            _SYNCHRONOUS,
        ),
    },
    "backup-replicas": {
        "R = 3 of 4, one backup": (
            partial(_replicas, replicas_to_aggregate=3),
            BATCH_SIZE,
        ),
        "R = 4 of 4, waits": (
            partial(_replicas, replicas_to_aggregate=4),
            BATCH_SIZE,
        ),
    },
}


class Device(keras.layers.Layer):
    """Takes as long as the device it stands for."""

    def compute_output_spec(
        self, inputs: Any, training: bool = False
    ) -> keras.KerasTensor:
        """Say that outputs are like inputs."""
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Sleep while training, ten times as long on the last tower."""
        if not training:
            return inputs
        tower = tf.identity(inputs).device.rpartition(":")[2]
        seconds = DEVICE_S * (SLOW if tower == str(TOWERS - 1) else 1)

        def sleep(values: Any) -> Any:
            time.sleep(seconds)
            return values

        outputs = tf.py_function(sleep, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)


class Curve(keras.callbacks.Callback):
    """The loss over the training data, and the updates, after every epoch."""

    def __init__(self, x: Any, y: Any):
        super().__init__()
        self._data = x, y
        self.times: list[float] = []
        self.losses: list[float] = []
        self.updates: list[int] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Note the loss of the untrained model."""
        self._spent = 0.0
        self._began = 0.0
        self._note()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Start the clock after the first step, when all is traced."""
        self._began = self._began or time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the clock, and look at the loss."""
        self._spent += time.perf_counter() - self._began
        self._note()
        if self._spent > TRAINING_S:
            self.model.stop_training = True
        # Looking took time that is not the training's.
        self._began = time.perf_counter()

    def _note(self) -> None:
        self.times.append(self._spent)
        self.losses.append(self.model.evaluate(*self._data, verbose=0))
        self.updates.append(int(self.model.optimizer.iterations))


def train(strategy: Any, batch_size: int) -> Curve:
    """Train a small classifier for some seconds; return the curve."""
    digits = load_digits()
    x = (digits.images / 16).astype("float32").reshape(-1, 64)
    curve = Curve(x, digits.target)
    keras.utils.set_random_seed(1)
    with strategy:
        model = keras.Sequential(
            [
                keras.Input((64,)),
                Device(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        model.fit(
            x,
            digits.target,
            batch_size=batch_size,
            epochs=1000,
            verbose=0,
            callbacks=[curve],
        )
    return curve


def draw(curves: Mapping[str, Curve], machine: str, updates: bool) -> Figure:
    """Draw losses against time and, if asked for, the number of updates."""
    figure = Figure((10.4 if updates else 6.2, 4.2), layout="constrained")
    *left, losses = figure.subplots(1, 2 if updates else 1, squeeze=False)[0]
    for title, curve in curves.items():
        for axes in left:
            axes.plot(curve.times, curve.updates)
            axes.set_ylabel("global step (updates), higher is better")
        label = f"{title}: {curve.losses[-1]:.2f}"
        losses.semilogy(curve.times, curve.losses, label=label)
    losses.set_ylabel("loss over 1,797 digits, lower is better")
    losses.legend(frameon=False, title="loss at the end", alignment="left")
    for axes in (*left, losses):
        axes.set_xlabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{TOWERS} towers, one of them {SLOW} times slower")
    figure.supxlabel(
        f"A layer sleeps {DEVICE_S * 1000:.0f} ms a step in place of a "
        f"device's work, {DEVICE_S * SLOW * 1000:.0f} ms on the slow tower.\n"
        f"{machine}",
        fontsize=7,
    )
    return figure


def main(name: str, path: str) -> None:
    """Train with one slow tower, and draw the curves into a PNG."""
    kt.virtual_towers(TOWERS)
    # A tower that sleeps keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * TOWERS)
    curves = {
        title: train(make(), batch_size)
        for title, (make, batch_size) in PICTURES[name].items()
    }
    machine = describe_machine(machine_facts(timeout_s=60))
    figure = draw(curves, machine, updates=name == "backup-replicas")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
