"""Train on handwritten digits in several processes, as Horovod's examples do.

Run it with ``keras-towers run -np 2 examples/horovod_mnist.py``. A script that
was written for ``horovod.keras`` or ``horovod.tensorflow.keras`` needs the
import below and no other change. The data are the 1,797 scanned digits that
come with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pathlib
import tempfile
from typing import Annotated

import keras
import numpy as np
import tensorflow as tf
import typer
from sklearn.datasets import load_digits

import keras_towers.horovod as hvd

TRAIN_EXAMPLES = 1500
RATE_OF_ONE_RANK = 0.02
WARM_UP_EPOCHS = 3


def use_own_gpu() -> None:
    """Leave every process of a machine one of its GPUs."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        gpu = gpus[hvd.local_rank() % len(gpus)]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)


def load() -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return examples to train on and to test with, as 28 by 28 pixels."""
    digits = load_digits()
    images = np.kron(digits.images / 16, np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., np.newaxis]
    images = images.astype("float32")
    split = TRAIN_EXAMPLES
    return (images[:split], digits.target[:split]), (
        images[split:],
        digits.target[split:],
    )


def make_model() -> keras.Model:
    """Return a small convolutional network."""
    return keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )


def main(
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples of one process in a step.")
    ] = 32,
    save: Annotated[
        pathlib.Path | None, typer.Option(help="Where the best model goes.")
    ] = None,
) -> None:
    """Train, each process on its share of the digits, and test."""
    hvd.init()
    use_own_gpu()
    (x, y), test = load()
    # As many batches for every rank: one that has more would wait for ever.
    share = len(x) // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)

    rate = RATE_OF_ONE_RANK * hvd.size()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(rate, momentum=0.9)
    )
    model = make_model()
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            rate, warmup_epochs=WARM_UP_EPOCHS, verbose=1
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = save or pathlib.Path(folder) / "digits.keras"
        if hvd.rank() == 0:
            callbacks.append(
                hvd.callbacks.BestModelCheckpoint(filepath=str(path))
            )
        model.fit(
            x[mine],
            y[mine],
            batch_size,
            epochs=epochs,
            validation_data=test,
            callbacks=callbacks,
            verbose=2 if hvd.rank() == 0 else 0,
        )
        if hvd.rank() == 0:
            # The file names Keras's own classes: no Horovod is needed for it.
            best = keras.models.load_model(path)
            accuracy = best.evaluate(*test, verbose=0)[1]
            print(f"test accuracy of the best model: {accuracy:.2%}")


if __name__ == "__main__":
    typer.run(main)
