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

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import keras
import tensorflow as tf
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, ScalarFormatter
from sklearn.datasets import load_digits

import keras_towers as kt
from keras_towers.doctor.probe import describe_machine, machine_facts

TOWERS = 4
SECONDS = 0.01
SLOW = 10
BATCH_SIZE = 32


@dataclass(frozen=True)
class Run:
    """A training, and its line in the picture."""

    title: str
    strategy: Callable[[], Any]
    colour: str
    line: str = "-"
    batch_size: int = BATCH_SIZE


def _replicas(aggregate: int) -> Callable[[], Any]:
    return partial(
        kt.SyncReplicasStrategy,
        replicas_to_aggregate=aggregate,
        total_num_replicas=TOWERS,
    )


# The default one has the colour that it has in the picture of the bench. A
# step of synchronous towers trains on as many batches as there are towers.
ASYNC_VS_SYNC = (
    Run(
        "TowerStrategy (the default), waits",
        partial(kt.TowerStrategy, TOWERS),
        "#1f6feb",
        batch_size=TOWERS * BATCH_SIZE,
    ),
    Run(
        "ParameterServerTowerStrategy, waits",
        partial(kt.ParameterServerTowerStrategy, TOWERS),
        "#123f8c",
        "--",
        batch_size=TOWERS * BATCH_SIZE,
    ),
    Run(
        "AsyncTowerStrategy, does not wait",
        partial(kt.AsyncTowerStrategy, TOWERS),
        "#d9822b",
    ),
)
BACKUP_REPLICAS = (
    Run("R = 4 of 4, waits", _replicas(4), "#1f6feb"),
    Run("R = 3 of 4, one backup", _replicas(3), "#d9822b"),
)


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
        seconds = SECONDS * (SLOW if tower == str(TOWERS - 1) else 1)

        def sleep(values: Any) -> Any:
            time.sleep(seconds)
            return values

        outputs = tf.py_function(sleep, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)


class Curve(keras.callbacks.Callback):
    """The loss over the training data, and the updates, after every epoch."""

    def __init__(self, x: Any, y: Any, seconds: float):
        super().__init__()
        self._data = x, y
        self._limit = seconds
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
        if self._spent > self._limit:
            self.model.stop_training = True
        # Looking took time that is not the training's.
        self._began = time.perf_counter()

    def _note(self) -> None:
        self.times.append(self._spent)
        self.losses.append(self.model.evaluate(*self._data, verbose=0))
        self.updates.append(int(self.model.optimizer.iterations))


def make_model() -> keras.Model:
    """Build and compile a small classifier: plain Keras."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            Device(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def train(run: Run, seconds: float) -> Curve:
    """Train for some seconds; return the curve."""
    digits = load_digits()
    x = (digits.images / 16).astype("float32").reshape(-1, 64)
    curve = Curve(x, digits.target, seconds)
    with run.strategy():
        make_model().fit(
            x,
            digits.target,
            batch_size=run.batch_size,
            epochs=1000,
            verbose=0,
            callbacks=[curve],
        )
    print(
        f"{run.title}: {curve.updates[-1]} updates and loss "
        f"{curve.losses[-1]:.3f} after {curve.times[-1]:.1f} s"
    )
    return curve


def draw(
    runs: Sequence[Run], curves: Sequence[Curve], machine: str, updates: bool
) -> Figure:
    """Draw losses against time and, if asked for, the number of updates."""
    figure = Figure((10.4 if updates else 6.2, 4.2), layout="constrained")
    *left, losses = figure.subplots(1, 2 if updates else 1, squeeze=False)[0]
    pairs = list(zip(runs, curves, strict=True))
    for axes in left:
        for run, curve in pairs:
            axes.plot(curve.times, curve.updates, color=run.colour)
        axes.set_ylabel("global step (updates), higher is better")
        axes.set_ylim(0)
    # The lowest first in the legend.
    for run, curve in sorted(pairs, key=lambda pair: pair[1].losses[-1]):
        label = f"{run.title}: {curve.losses[-1]:.2f}"
        losses.plot(
            curve.times, curve.losses, run.line, label=label, color=run.colour
        )
    losses.set_ylabel("loss over 1,797 digits, lower is better")
    losses.set_yscale("log")
    losses.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    losses.yaxis.set_major_formatter(ScalarFormatter())
    losses.yaxis.set_minor_formatter("")
    losses.legend(frameon=False, title="loss at the end", alignment="left")
    for axes in (*left, losses):
        axes.set_xlim(0)
        axes.set_xlabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{TOWERS} towers, one of them {SLOW} times slower")
    figure.supxlabel(
        f"A layer sleeps {SECONDS * 1000:.0f} ms a step in place of a device's "
        f"work, {SECONDS * SLOW * 1000:.0f} ms on the slow tower.\n{machine}",
        fontsize=7,
    )
    return figure


PICTURES = {"async-vs-sync": ASYNC_VS_SYNC, "backup-replicas": BACKUP_REPLICAS}


def main(
    name: Annotated[str, typer.Argument(help=" or ".join(PICTURES))],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
    seconds: Annotated[float, typer.Option(help="training of each")] = 6.0,
) -> None:
    """Train with one slow tower, and draw the curves."""
    kt.virtual_towers(TOWERS)
    # A tower that sleeps keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * TOWERS)
    runs = PICTURES[name]
    curves = [train(run, seconds) for run in runs]
    machine = describe_machine(machine_facts(timeout_s=60))
    figure = draw(runs, curves, machine, updates=runs is BACKUP_REPLICAS)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
