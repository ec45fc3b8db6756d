"""An ordinary script that trains until something ends it."""

import keras
import numpy as np

keras.utils.set_random_seed(1)
X = np.random.default_rng(0).normal(size=(640, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(
    X,
    X.sum(1, keepdims=True),
    epochs=10**6,
    verbose=0,
    callbacks=[
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: print(epoch, "steps", flush=True)
        )
    ],
)
