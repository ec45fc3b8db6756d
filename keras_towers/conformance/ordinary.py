"""Whether a model is an ordinary Keras model."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_towers.fit.weights.model_binding import strategy_that_runs
from keras_towers.fit.weights.shards import is_over_ranks


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers among the attributes of a model, wrapped ones too."""
    kind = keras.optimizers.Optimizer
    found = [value for value in vars(model).values() if isinstance(value, kind)]
    inner = [getattr(item, "inner_optimizer", None) for item in found]
    return found + [item for item in inner if item is not None]


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Weights, optimizers, metrics, seeds: not by keras_towers's own search."""
    variables = list(model.variables)
    for optimizer in optimizers(model):
        variables += optimizer.variables
    for metric in model.metrics:
        variables += metric.variables
    for layer in model._flatten_layers():
        variables += [g.state for g in getattr(layer, "_seed_generators", ())]
    return list({id(variable): variable for variable in variables}.values())


class Originals:
    """The ``tf.Variable`` objects of a model, to be found again."""

    def __init__(self, model: keras.Model):
        self.model = model
        self.held: list[tuple[keras.Variable, tf.Variable]] = [
            (v, v._value) for v in all_variables(model)
        ]

    def assert_back(self) -> None:
        """The model is an ordinary one, with the same variables."""
        assert_ordinary(self.model)
        for variable, value in self.held:
            require(variable._value is value, variable.path)


def assert_ordinary(model: keras.Model, trains_on_towers: bool = False) -> None:
    """Nothing of a strategy is left in the model.

    Args:
        model: the model.
        trains_on_towers: it was made in a block, and trains on its towers.
    """
    default = tf.distribute.get_strategy()
    require(not tf.distribute.has_strategy(), "a strategy is still entered")
    for variable in all_variables(model):
        if is_over_ranks(variable):
            # Until all ranks read it, each has its part.
            variable.numpy()
        value, path = variable._value, variable.path
        ours = isinstance(value, tf.distribute.DistributedValues)
        require(isinstance(value, tf.Variable) and not ours, path)
        for holder in (value, value.handle):
            require(not hasattr(holder, "_distributed_container"), path)
    for optimizer in optimizers(model):
        require(optimizer._distribution_strategy is default, optimizer.name)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            require(layer._distribute_strategy is None, layer.name)
            trains = bool(strategy_that_runs(layer, "fit"))
            require(trains == trains_on_towers, layer.name)
            require("_make_function" not in vars(layer), layer.name)


def require(condition: bool, name: str) -> None:
    """Raise an error about a part of a model that is still on the towers."""
    if not condition:
        raise AssertionError(f"{name} is not as it was before the block")
