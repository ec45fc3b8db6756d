"""What a rank has at its peak, relative to a model's weights and slots.

Its own numbers: the state, by sizes and not by variables.
"""

import sys

import keras
import numpy as np

import keras_towers as kt
from keras_towers.bench.worker import peak_memory, reset_peak_memory

WIDTH, LAYERS = 1024, 24
STATE_MB = 3 * 4 * WIDTH**2 * LAYERS / 1e6


def compiled(width, layers):
    made = keras.Sequential(
        [keras.Input((width,))]
        + [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    )
    made.compile(keras.optimizers.Adam(1e-4), "mse")
    return made


def train(model, width):
    x = np.ones((16, width), "float32")
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)


options = {"weights": "sharded", "gather_bytes": "16MiB"}
if sys.argv[1] == "whole":
    options = {}
strategy = kt.HorovodStrategy(towers=1, **options)
with strategy:
    # What a process has with any model: what kernels and messages need.
    train(compiled(WIDTH, 1), WIDTH)
    before = reset_peak_memory()
    train(compiled(WIDTH, LAYERS), WIDTH)
    ratio = (peak_memory() - before) / STATE_MB
    described = strategy.describe()
assert "the peak memory of this process is" in described, described
if strategy.rank == 0:
    print(f"peak {ratio:.2f}", flush=True)
