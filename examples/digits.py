"""Train the same model on one device and on towers, and compare.

``make demo`` or ``python examples/digits.py``; the data are scikit-learn's
scanned digits.
"""

import contextlib
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_towers as kt

if not tf.config.list_physical_devices("GPU"):
    kt.virtual_towers(4)  # splits the CPU

images, labels = load_digits(return_X_y=True)
x, y = images.reshape(-1, 8, 8, 1).astype("float32") / 16, labels
order = np.random.default_rng(0).permutation(len(y))
train, test = order[:1500], order[1500:]


class StepTimes(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())


def fit(strategy):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            # Smooth: where rounding decides on which side of a kink a value
            # is, two runs on one device may differ by as much as the weights.
            keras.layers.Conv2D(32, 3, padding="same", activation="tanh"),
            keras.layers.Conv2D(64, 3, strides=2, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, "tanh"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    times = StepTimes()
    with strategy:  # the only line that knows of towers
        model.fit(
            x[train], y[train], batch_size=64, epochs=8, callbacks=[times]
        )
    accuracy = model.evaluate(x[test], y[test], verbose=0)[1]
    step_ms = 1e3 * statistics.median(np.diff(times.ends))
    print(f"test accuracy {accuracy:.2%}, {step_ms:.2f} ms per step\n")
    return model.get_weights()


one = fit(contextlib.nullcontext())
many = fit(kt.TowerStrategy())
difference = max(np.abs(a - b).max() for a, b in zip(one, many, strict=True))
print(f"largest difference of a weight: {difference:.1e}")
