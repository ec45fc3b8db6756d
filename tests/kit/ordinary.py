"""Assertions that a model is an ordinary Keras model."""

import keras
import tensorflow as tf

from keras_towers.fit.weights.model_binding import strategy_that_runs
from keras_towers.fit.weights.shards import is_over_ranks


def optimizers(model):
    """The optimizers of a model of these tests, wrapped ones too."""
    kind = keras.optimizers.Optimizer
    found = [value for value in vars(model).values() if isinstance(value, kind)]
    inner = [getattr(item, "inner_optimizer", None) for item in found]
    return found + [item for item in inner if item is not None]


def all_variables(model):
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

    def __init__(self, model):
        self.model = model
        self.held = [(v, v._value) for v in all_variables(model)]
        assert self.held

    def assert_back(self):
        """The model is an ordinary one, with the same variables."""
        assert_ordinary(self.model)
        for variable, value in self.held:
            assert variable._value is value, variable.path


def assert_ordinary(model, trains_on_towers=False):
    """Nothing of a strategy is left in the model.

    Args:
        trains_on_towers: it was made in a block, and trains on its towers.
    """
    default = tf.distribute.get_strategy()
    assert not tf.distribute.has_strategy()
    for variable in all_variables(model):
        if is_over_ranks(variable):
            # Until all ranks read it, each has its part.
            variable.numpy()
        value = variable._value
        assert isinstance(value, tf.Variable), variable.path
        assert not isinstance(value, tf.distribute.DistributedValues), (
            variable.path
        )
        for holder in (value, value.handle):
            assert not hasattr(holder, "_distributed_container"), variable.path
    for optimizer in optimizers(model):
        assert optimizer._distribution_strategy is default
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            assert layer._distribute_strategy is None
            assert bool(strategy_that_runs(layer, "fit")) == trains_on_towers
            assert "_make_function" not in vars(layer)
