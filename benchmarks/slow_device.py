"""Draw training against wall time, with one of four towers that is slow.

``python -m benchmarks.slow_device async-vs-sync`` draws the loss,
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
IMAGES = Path(__file__).parents[1] / "docs/images"


@dataclass(frozen=True)
class Run:
    """A training, and its line in the picture."""

    title: str
    strategy: Callable[[], Any]
    colour: str
    line: str = "-"
    # A step of synchronous towers trains on as many batches as there are
    # towers; others take a batch each.
    batch_size: int = BATCH_SIZE


def _towers(
    name: str, title: str, colour: str, line: str = "-", each: int = TOWERS
) -> Run:
    strategy = partial(kt.strategy, name, towers=TOWERS)
    return Run(title, strategy, colour, line, each * BATCH_SIZE)


def _replicas(aggregate: int, title: str, colour: str) -> Run:
    strategy = partial(
        kt.SyncReplicasStrategy,
        replicas_to_aggregate=aggregate,
        total_num_replicas=TOWERS,
    )
    return Run(f"R = {aggregate} of {TOWERS}, {title}", strategy, colour)


# The default one has the colour that it has in the picture of the bench.
ASYNC_VS_SYNC = (
    _towers("tower", "TowerStrategy (the default), waits", "#1f6feb"),
    _towers(
        *("parameter-server", "ParameterServerTowerStrategy, waits"),
        *("#123f8c", "--"),
    ),
    _towers("async", "AsyncTowerStrategy, does not wait", "#d9822b", each=1),
)
BACKUP_REPLICAS = (
    _replicas(TOWERS, "waits", "#1f6feb"),
    _replicas(TOWERS - 1, "one backup", "#d9822b"),
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
    options = {"epochs": 1000, "verbose": 0, "callbacks": [curve]}
    with run.strategy():
        make_model().fit(x, digits.target, batch_size=run.batch_size, **options)
    print(
        f"{run.title}: {curve.updates[-1]} updates and loss "
        f"{curve.losses[-1]:.3f} after {curve.times[-1]:.1f} s"
    )
    return curve


def draw_losses(
    axes: Any, runs: Sequence[Run], curves: Sequence[Curve]
) -> None:
    """Draw losses against time, the lowest first in the legend."""
    pairs = zip(runs, curves, strict=True)
    for run, curve in sorted(pairs, key=lambda pair: pair[1].losses[-1]):
        label = f"{run.title}: {curve.losses[-1]:.2f}"
        axes.plot(
            *(curve.times, curve.losses, run.line),
            label=label,
            color=run.colour,
        )
    axes.set_ylabel("loss over 1,797 digits, lower is better")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter("")
    _over_time(axes)
    axes.legend(frameon=False, title="loss at the end", alignment="left")


def draw_updates(
    axes: Any, runs: Sequence[Run], curves: Sequence[Curve]
) -> None:
    """Draw the number of updates against time."""
    for run, curve in zip(runs, curves, strict=True):
        axes.plot(curve.times, curve.updates, color=run.colour)
    axes.set_ylabel("global step (updates), higher is better")
    axes.set_ylim(0)
    _over_time(axes)


def _over_time(axes: Any) -> None:
    axes.set_xlim(0)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)


def draw(
    runs: Sequence[Run],
    curves: Sequence[Curve],
    machine: str,
    *panels: Callable[[Any, Sequence[Run], Sequence[Curve]], None],
) -> Figure:
    """Draw panels of what was trained on a machine."""
    figure = Figure((2 + 4.2 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for panel, across in zip(panels, axes.flat, strict=True):
        panel(across, runs, curves)
    figure.suptitle(f"{TOWERS} towers, one of them {SLOW} times slower")
    figure.supxlabel(
        f"A layer sleeps {SECONDS * 1000:.0f} ms a step in place of a device's "
        f"work, {SECONDS * SLOW * 1000:.0f} ms on the slow tower.\n{machine}",
        fontsize=7,
    )
    return figure


app = typer.Typer(no_args_is_help=True, add_completion=False)
Picture = Annotated[Path, typer.Argument(help="PNG to write")]
Seconds = Annotated[float, typer.Option(help="training of each")]


@app.command()
def async_vs_sync(
    picture: Picture = IMAGES / "async_vs_sync.png", seconds: Seconds = 6.0
) -> None:
    """Train with strategies that wait, and one that does not."""
    _measure(ASYNC_VS_SYNC, seconds, picture, draw_losses)


@app.command()
def backup_replicas(
    picture: Picture = IMAGES / "backup_replicas.png", seconds: Seconds = 6.0
) -> None:
    """Train without and with a backup replica."""
    _measure(BACKUP_REPLICAS, seconds, picture, draw_updates, draw_losses)


def _measure(
    runs: Sequence[Run], seconds: float, picture: Path, *panels: Any
) -> None:
    kt.virtual_towers(TOWERS)
    # A tower that sleeps keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * TOWERS)
    curves = [train(run, seconds) for run in runs]
    machine = describe_machine(machine_facts(timeout_s=60))
    draw(runs, curves, machine, *panels).savefig(picture, dpi=130)


if __name__ == "__main__":
    app()
