"""A worker that trains a little and says with which result."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_towers as kt

keras.utils.set_random_seed(7)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.arange(32, dtype="float32").reshape(8, 4) / 32
alone = keras.models.clone_model(model)
alone.set_weights(model.get_weights())
alone.compile(keras.optimizers.SGD(0.1), "mse")
with kt.BytePSStrategy() as strategy:
    model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
alone.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
for mine, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
    np.testing.assert_allclose(mine, wanted, rtol=1e-5)
print(f"rank {strategy.rank} of {strategy.size} is right", flush=True)
