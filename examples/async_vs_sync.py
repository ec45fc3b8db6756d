"""Draw the loss against wall time, with one tower that is slow.

Run it with ``python examples/async_vs_sync.py [PNG]``; needs ``pip install
'keras-towers[demo,plots]'``. The data are the scanned digits that come with
scikit-learn. A layer sleeps as long as a device might compute, ten times as
long on the last tower: so the picture does not depend on how many cores share
the towers' work.
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

matplotlib.use("Agg")
from matplotlib import pyplot

TOWERS = 4
SECONDS = 0.01
SLOW = 10
BATCH_SIZE = 32
PICTURE = Path(__file__).with_suffix(".png")

# Strategies by name, with title, colour and line style.
RUNS = {
    "tower": ("synchronous: TowerStrategy", "#d9822b", "-"),
    "parameter-server": (
        "synchronous: ParameterServerTowerStrategy",
        "#6f4e37",
        "--",
    ),
    "async": ("asynchronous: AsyncTowerStrategy", "#1f6feb", "-"),
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
        self._began: float | None = None
        self._note()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Start the clock behind the first step, when all is traced."""
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
    digits = load_digits()
    x = (digits.images / 16).astype("float32").reshape(-1, 64)
    curve = Curve(x, digits.target, seconds)
    strategy = kt.strategy(name, towers=TOWERS)
    # Every tower takes a batch of this size: a step of synchronous towers
    # trains on as many of them as there are towers.
    each = BATCH_SIZE * (1 if name == "async" else TOWERS)
    with strategy:
        make_model().fit(
            x,
            digits.target,
            batch_size=each,
            epochs=1000,
            verbose=0,
            callbacks=[curve],
        )
    return curve


def main(
    picture: Annotated[Path, typer.Argument(help="PNG to write")] = PICTURE,
    seconds: Annotated[float, typer.Option(help="training of each")] = 6.0,
) -> None:
    """Train with every strategy that there is, and draw the curves."""
    kt.virtual_towers(TOWERS)
    # A tower that sleeps keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * TOWERS)
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, (title, colour, line) in RUNS.items():
        curve = train(name, seconds)
        axes.plot(curve.times, curve.losses, line, label=title, color=colour)
        print(
            f"{title}: loss {curve.losses[-1]:.3f} after "
            f"{curve.times[-1]:.1f} s"
        )
    axes.set_yscale("log")
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss (1,797 digits)")
    axes.set_title(f"{TOWERS} towers, one of them {SLOW} times slower")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
