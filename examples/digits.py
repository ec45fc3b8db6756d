"""Train on handwritten digits, on one device and then on several towers.

Run it with ``python examples/digits.py``, or ``make demo``. The data are the
1,797 scanned digits that come with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import os

# TensorFlow reads these when it is imported, and would fill the screen.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import contextlib
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any

import keras
import numpy as np
import tensorflow as tf
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import keras_towers as kt

BATCH_SIZE = 64
TRAIN_EXAMPLES = 1500
WARM_UP_STEPS = 5
# Sums in another order differ in the last digits, which many steps magnify.
ROUNDING = 1e-4


@dataclass
class Outcome:
    """What one training gave."""

    accuracy: float
    weights: list[np.ndarray]
    step_ms: float


class StepTimer(keras.callbacks.Callback):
    """Notes how long steps take, from one begin to the next."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget the steps of an earlier fit."""
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start anew: the time between epochs belongs to no step."""
        self._begins: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the time."""
        self._begins.append(time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep the times of this epoch's steps."""
        pairs = itertools.pairwise(self._begins)
        self.seconds += [after - before for before, after in pairs]

    @property
    def step_ms(self) -> float:
        """The median milliseconds of a step, the first few left out."""
        return 1e3 * statistics.median(self.seconds[WARM_UP_STEPS:])


def make_model() -> keras.Model:
    """Build and compile a small CNN: plain Keras, nothing about towers."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def load_data() -> tuple[Any, Any]:
    """Return the images and labels to train on, and those to test on."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = (digits.images[order, :, :, None] / 16).astype("float32")
    y = digits.target[order]
    train, test = slice(TRAIN_EXAMPLES), slice(TRAIN_EXAMPLES, None)
    return (x[train], y[train]), (x[test], y[test])


def train(strategy: Any, epochs: int) -> Outcome:
    """Train a fresh model inside the strategy, and test it outside."""
    (x, y), test = load_data()
    model = make_model()
    timer = StepTimer()
    with strategy:
        model.fit(
            x,
            y,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            shuffle=False,
            callbacks=[timer],
        )
    _, accuracy = model.evaluate(*test, verbose=0)
    return Outcome(accuracy, model.get_weights(), timer.step_ms)


def show(console: Console, one: Outcome, many: Outcome, towers: str) -> float:
    """Compare the two in a table; return the largest weight difference."""
    difference = max(
        float(np.abs(a - b).max())
        for a, b in zip(one.weights, many.weights, strict=True)
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column()
    table.add_column("one device", justify="right")
    table.add_column(towers, justify="right")
    table.add_row(
        "test accuracy", f"{one.accuracy:.2%}", f"{many.accuracy:.2%}"
    )
    table.add_row("largest weight difference", "", f"{difference:.1e}")
    table.add_row(
        "median milliseconds a step",
        f"{one.step_ms:.2f}",
        f"{many.step_ms:.2f}",
    )
    console.print(table)
    return difference


def main(
    towers: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many. By default all GPUs, or 4 without any."
        ),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="How towers sum their gradients.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 8,
) -> None:
    """Train a CNN on handwritten digits on one device, then on towers."""
    console = Console(highlight=False)
    gpus = len(tf.config.list_physical_devices("GPU"))
    if not gpus:
        towers = towers or 4
        kt.virtual_towers(towers)

    console.rule("model.fit(x, y) on one device")
    one = train(contextlib.nullcontext(), epochs)

    strategy = kt.TowerStrategy(towers, mode=mode)
    count = strategy.num_replicas_in_sync
    console.rule(f"with kt.TowerStrategy({count}): model.fit(x, y)")
    many = train(strategy, epochs)

    difference = show(console, one, many, f"{count} towers")
    same = "the same weights, float rounding apart"
    console.print(
        f"The same Keras model, trained by the same fit on {count} towers, "
        f"ends with {same if difference < ROUNDING else 'OTHER weights'}."
    )
    if not gpus:
        console.print(
            "The towers here share one CPU: the milliseconds show what a step "
            "costs with its gradients summed over them, not a speed-up.",
            style="dim",
        )


if __name__ == "__main__":
    typer.run(main)
