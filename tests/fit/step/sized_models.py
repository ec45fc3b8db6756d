"""Models whose weights or activations are large, and what steps need."""

from collections import Counter

import keras
import numpy as np

from keras_towers.fit.step.reports import step_reports

RANDOM = np.random.default_rng(0)


def made(layers, optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    first, *sizes = layers
    dense = [keras.layers.Dense(size, "relu") for size in sizes]
    model = keras.Sequential([keras.Input((first,)), *dense], name="mine")
    model.compile(optimizer, "mse", **{"jit_compile": False, **options})
    return model


def wide(*optimizer, **options):
    """Large weights: 1.71 MB."""
    return made((256, 512, 512, 64), *optimizer, **options)


def deep(*optimizer, **options):
    """Large activations: 524 KB of each of 4 layers, for 2048 examples."""
    return made((64, 64, 64, 64, 64), *optimizer, **options)


def data_of(model, examples=64):
    shapes = model.input_shape[1:], model.output_shape[1:]
    return [
        RANDOM.random((examples, *shape), dtype="float32") for shape in shapes
    ]


def strategy_costs(strategy):
    """The bytes that steps are planned to need, with variables."""
    held = strategy._adoption.held_bytes().values()
    variables = max(sum(map(Counter, held), Counter()).values())
    steps = step_reports._costs[strategy].values()
    return [variables + costs.plan.bytes for costs in steps]


def fit(model, examples=64):
    x, y = data_of(model, examples)
    return model.fit(x, y, batch_size=examples, verbose=0)
