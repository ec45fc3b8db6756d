"""Trains until something ends it, in the strategy that its argument names."""

import sys

import keras
import numpy as np

import keras_towers as kt

strategy = getattr(kt, sys.argv[1])()
keras.utils.set_random_seed(1)
X = np.random.default_rng(0).normal(size=(640, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
tell = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: print(epoch, "steps", flush=True)
)
with strategy:
    model.fit(
        X, X.sum(1, keepdims=True), epochs=10**6, verbose=0, callbacks=[tell]
    )
