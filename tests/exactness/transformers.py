"""A model with a random layer after ``Dense`` on sequences, and its data.

Keras may compute ``Dense`` on inputs of rank 3 by ``tf.tensordot``: which
dimension of its output has the examples is then computed in the graph.
"""

import keras
import numpy as np
from keras import layers

_random = np.random.default_rng(4)
EXAMPLES = 21
BATCH = 8  # the last batch has 5 examples
WIDTH, LENGTH = 8, 12
SERIES = _random.normal(size=(EXAMPLES, LENGTH, WIDTH)).astype("float32")
TARGETS = _random.normal(size=(EXAMPLES, 1)).astype("float32")


def smallest():
    """One draw after ``Dense`` on inputs of rank 3."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((LENGTH, WIDTH)),
            layers.Dense(WIDTH),
            layers.Dropout(0.3),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )


MODELS = {"smallest": (smallest, SERIES)}


def make(name):
    """The compiled model, the same every time."""
    model = MODELS[name][0]()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def train(name, model):
    """An epoch, which ends with a smaller batch."""
    return model.fit(
        MODELS[name][1], TARGETS, batch_size=BATCH, shuffle=False, verbose=0
    )
