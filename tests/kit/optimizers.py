"""The optimizers that Keras has."""

import inspect

import keras

# By name, but for those that hold others.
OPTIMIZERS = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if inspect.isclass(value)
    and issubclass(value, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)
