"""Small training runs, and what makes a model an ordinary Keras model."""

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.exactness import models as m

EXAMPLES = 53
BATCH = 16
STEPS = 4  # the last batch has 5 examples
X, Y = m.FEATURES[:EXAMPLES], m.LABELS[:EXAMPLES]
TOLERANCE = 2e-6

# What the trainer of an adopted model must not keep.
_METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


def adam(**kwargs):
    return keras.optimizers.Adam(0.01, **kwargs)


def classifier(*middle, optimizer=adam, **kwargs):
    """A built and compiled classifier of ``X``."""
    model = m.mlp(*middle)
    arguments = {"metrics": ["accuracy"], **kwargs}
    model.compile(optimizer(), m.cross_entropy(), **arguments)
    return model


def fit(model, epochs=1, x=X, y=Y, **kwargs):
    """``fit`` in order; returns the history."""
    return model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **kwargs,
    ).history


def close(found, wanted, tolerance=TOLERANCE, message=""):
    np.testing.assert_allclose(
        found, wanted, rtol=tolerance, atol=tolerance, err_msg=message
    )


def same_history(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        close(found[name], values, message=name)


def optimizers(model: keras.Model) -> list[Any]:
    """The optimizers of a model of these tests, wrapped ones too."""
    found = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]
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
        self.held = [(v, v._value) for v in all_variables(model)]
        assert self.held

    def assert_back(self) -> None:
        for variable, value in self.held:
            assert variable._value is value, variable.path


def assert_ordinary(model: keras.Model) -> None:
    """Nothing of a strategy is left in the model."""
    default = tf.distribute.get_strategy()
    assert not tf.distribute.has_strategy()
    for variable in all_variables(model):
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
            assert not set(_METHODS) & set(vars(layer))


_of_other_tests: set[int] = set()


def variables_on_towers() -> list[str]:
    """Paths of this test's Keras variables, of any owner, on towers."""
    return [
        variable.path
        for variable in _all_on_towers()
        if id(variable) not in _of_other_tests
    ]


def forget_other_tests() -> None:
    """Leave out what tests of other files have left on towers for good."""
    _of_other_tests.clear()
    _of_other_tests.update(map(id, _all_on_towers()))


def _all_on_towers() -> list[keras.Variable]:
    gc.collect()
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), keras.Variable)
        and isinstance(item._value, tf.distribute.DistributedValues)
    ]


def same_model(found, wanted, tolerance=TOLERANCE) -> None:
    """Weights, optimizer state and metrics of two models are the same."""
    pairs = zip(all_variables(found), all_variables(wanted), strict=True)
    for mine, other in pairs:
        # The stream of a random generator goes on as it did.
        message = f"{mine.path} {other.path}"
        close(mine.numpy(), other.numpy(), tolerance, message)


def together(make: Callable, act: Callable, strategy: Any, tolerance=TOLERANCE):
    """``act(make())`` on one device and inside ``with strategy`` are the same.

    Returns:
        the model that was on the towers, and what ``act`` returned for it.
    """
    reference = make()
    wanted = act(reference)
    model = make()
    originals = Originals(model)
    with strategy:
        found = act(model)
    assert_ordinary(model)
    originals.assert_back()
    same_model(model, reference, tolerance)
    if wanted is not None:
        tf.nest.map_structure(
            lambda a, b: close(a, b, tolerance), found, wanted
        )
    return model, found
