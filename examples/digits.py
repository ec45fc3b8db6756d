"""The same model on one device and on towers: ``make demo``.

``python examples/digits.py``; the data are scikit-learn's scanned digits.
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
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, activation="relu"),
            *(layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(sgd, loss, metrics=["accuracy"])
    with strategy:  # the only line that knows of towers
        model.fit(x[train], y[train], 64, 8, callbacks=[times := StepTimes()])
    accuracy = model.evaluate(x[test], y[test], verbose=0)[1]
    step_ms = 1e3 * statistics.median(np.diff(times.ends))
    print(f"test accuracy {accuracy:.2%}, {step_ms:.2f} ms per step\n")
    return model.get_weights()


one = fit(contextlib.nullcontext())
many = fit(kt.TowerStrategy())
difference = max(np.abs(a - b).max() for a, b in zip(one, many, strict=True))
print(f"largest difference of a weight: {difference:.1e}")
