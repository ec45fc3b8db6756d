"""Train with a contrastive loss over the whole batch, unchanged, on towers.

``python examples/contrastive.py``. The loss compares each view of an image with
the other views of the whole batch. Each tower has some of the images; towers
exchange what the others need.
"""

import contextlib

import keras
import numpy as np

import keras_towers as kt

kt.virtual_towers(4)  # splits the CPU; leave it out with GPUs

views = np.random.default_rng(0).random((512, 2, 16), "float32")
views[:, 1] = views[:, 0] + 0.05 * views[:, 1]


class InfoNCE(keras.losses.Loss):
    def call(self, y_true, y_pred):
        first, second = keras.ops.unstack(y_pred, axis=1)
        logits = keras.ops.matmul(first, keras.ops.transpose(second)) / 0.1
        positive = keras.ops.sum(first * second, axis=1) / 0.1
        return keras.ops.logsumexp(logits, axis=1) - positive


def train(strategy):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2, 16)),
            keras.layers.Dense(32, "relu"),
            keras.layers.Dense(8),
            keras.layers.UnitNormalization(),
        ]
    )
    model.compile("adam", InfoNCE())
    with strategy:
        model.fit(views, views, batch_size=64, epochs=3, verbose=2)
    return model.get_weights()


one = train(contextlib.nullcontext())
many = train(kt.TowerStrategy())
difference = max(np.abs(a - b).max() for a, b in zip(one, many, strict=True))
print(f"largest difference of a weight to one device: {difference:.1e}")
