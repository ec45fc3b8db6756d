"""Draw the loss against wall time, with one tower that is slow.

Run it with ``python -m benchmarks.async_vs_sync [PNG]``; needs scikit-learn and
matplotlib, of the extras ``demo`` and ``plots``. The data are the scanned
digits that come with scikit-learn. A layer sleeps as long as a device might
compute, ten times as long on the last tower: so the picture does not depend on
how many cores share the towers' work.
"""

from __future__ import annotations

import os

# TensorFlow reads these when it is imported, and would fill the screen.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import time
from pathlib import Path
from typing import Annotated, Any

import keras
import matplotlib
import tensorflow as tf
import typer
from sklearn.datasets import load_digits

import keras_towers as kt
from keras_towers.doctor.probe import describe_machine, machine_facts

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, ScalarFormatter

TOWERS = 4
SECONDS = 0.01
SLOW = 10
BATCH_SIZE = 32
PICTURE = Path(__file__).parents[1] / "docs/images/async_vs_sync.png"

# Strategies by name, with title, colour and line style. The default one has the
# colour that it has in the picture of the bench.
RUNS = {
    "tower": ("TowerStrategy (the default), waits", "#1f6feb", "-"),
    "parameter-server": (
        "ParameterServerTowerStrategy, waits",
        "#123f8c",
        "--",
    ),
    "async": ("AsyncTowerStrategy, does not wait", "#d9822b", "-"),
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
        seconds = SECONDS * (SLOW if tower == str(TOWERS - 1) else 1)

        def sleep(values: Any) -> Any:
            time.sleep(seconds)
            return values

        outputs = tf.py_function(sleep, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)


class Curve(keras.callbacks.Callback):
    """The loss over the training data, after every epoch."""

    def __init__(self, x: Any, y: Any, seconds: float):
        super().__init__()
        self._data = x, y
        self._limit = seconds
        self.times: list[float] = []
        self.losses: list[float] = []

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


def train(name: str, seconds: float) -> Curve:
    """Train for some seconds; return the curve."""
    x, y = data()
    curve = Curve(x, y, seconds)
    # Every tower takes a batch of this size: a step of synchronous towers
    # trains on as many of them as there are towers.
    each = BATCH_SIZE * (1 if name == "async" else TOWERS)
    options = {"epochs": 1000, "verbose": 0, "callbacks": [curve]}
    with kt.strategy(name, towers=TOWERS):
        make_model().fit(x, y, batch_size=each, **options)
    return curve


def data() -> tuple[Any, Any]:
    """Images of shape [1797, 64], and their digits."""
    digits = load_digits()
    return (digits.images / 16).astype("float32").reshape(-1, 64), digits.target


def draw(
    curves: dict[str, tuple[list[float], list[float]]], machine: str
) -> pyplot.Figure:
    """Draw the curves, the lowest loss first in the legend.

    Args:
        curves: seconds and losses of every strategy, by its name.
        machine: where they were measured.
    """
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for name in sorted(curves, key=lambda name: curves[name][1][-1]):
        title, colour, line = RUNS[name]
        times, losses = curves[name]
        label = f"{title}: {losses[-1]:.2f}"
        axes.plot(times, losses, line, label=label, color=colour)
    over_time(axes)
    of_losses(axes)
    axes.set_title(f"{TOWERS} towers, one of them {SLOW} times slower")
    axes.legend(frameon=False, title="loss at the end", alignment="left")
    explain(figure, "tower", machine)
    return figure


def over_time(axes: Any) -> None:
    """Let axes begin with the training."""
    axes.set_xlim(0)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)


def of_losses(axes: Any) -> None:
    """Let axes show losses."""
    axes.set_ylabel("loss over 1,797 digits, lower is better")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter("")


def explain(figure: pyplot.Figure, slow: str, machine: str) -> None:
    """Say below a picture what was measured, and where."""
    figure.supxlabel(
        f"A layer sleeps {SECONDS * 1000:.0f} ms a step in place of a device's "
        f"work, {SECONDS * SLOW * 1000:.0f} ms on the slow {slow}.\n{machine}",
        fontsize=7,
    )


def main(
    picture: Annotated[Path, typer.Argument(help="PNG to write")] = PICTURE,
    seconds: Annotated[float, typer.Option(help="training of each")] = 6.0,
) -> None:
    """Train with every strategy that there is, and draw the curves."""
    kt.virtual_towers(TOWERS)
    # A tower that sleeps keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * TOWERS)
    curves = {}
    for name, (title, _, _) in RUNS.items():
        curve = train(name, seconds)
        curves[name] = curve.times, curve.losses
        print(
            f"{title}: loss {curve.losses[-1]:.3f} after "
            f"{curve.times[-1]:.1f} s"
        )
    machine = describe_machine(machine_facts(timeout_s=60))
    draw(curves, machine).savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
