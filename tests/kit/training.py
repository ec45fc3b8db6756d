"""Small training runs: their data, their models and their ``fit``."""

import contextlib
import functools
from unittest import mock

import keras

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.case_models import compiled
from keras_towers.strategies import base

EXAMPLES = 53
BATCH = 16
STEPS = 4  # the last batch has 5 examples
X, Y = m.FEATURES[:EXAMPLES], m.LABELS[:EXAMPLES]


class OwnSlots(keras.optimizers.Optimizer):
    """Makes its slots by their shapes; half of them begin as their weights."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.m, self.slow = [], []
            for v in variables:
                self.m.append(self.add_variable(v.shape, "zeros", name="m"))
                slow = functools.partial(_copy, v)
                self.slow.append(self.add_variable(v.shape, slow, name="slow"))

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        m, slow = self.m[index], self.slow[index]
        self.assign(m, m * 0.9 + gradient)
        self.assign_add(slow, 0.1 * (variable - slow))
        self.assign_sub(variable, learning_rate * (m + slow))


def _copy(variable, *_, **__):
    return keras.ops.copy(variable)


def adam(**kwargs):
    return keras.optimizers.Adam(0.01, **kwargs)


def classifier(*middle, optimizer=adam, **kwargs):
    """A built and compiled classifier of ``X``."""
    model = m.mlp(*middle)
    arguments = {"metrics": ["accuracy"], **kwargs}
    model.compile(optimizer(), m.cross_entropy(), **arguments)
    return model


def linear(*middle, optimizer=m.momentum, cls=keras.Sequential, **kwargs):
    """A built and compiled classifier of ``X`` with little to trace."""
    keras.utils.set_random_seed(1)
    model = cls([keras.Input((6,)), *middle, keras.layers.Dense(3)])
    model.compile(optimizer(), m.cross_entropy(), **kwargs)
    return model


def seeded(build, *args, metrics=lambda: None, **options):
    """Like ``compiled``, of what a function or a class makes from one seed."""

    def make():
        keras.utils.set_random_seed(1)
        return build()

    return compiled(make, *args, metrics=metrics, **options)


def stacked(
    layers,
    shape=(6,),
    cls=keras.Sequential,
    metrics=lambda: ["accuracy"],
    **options,
):
    """Likewise, of layers that a function makes.

    Their initializers take a seed when they are made.
    """
    return seeded(
        lambda: cls([keras.Input(shape), *layers()]), metrics=metrics, **options
    )


def fit(model, epochs=1, x=X, y=Y, batch_size=BATCH, **kwargs):
    """``fit`` in order; returns the history."""
    options = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options, **kwargs).history


@contextlib.contextmanager
def prefetching(to_towers=True):
    """Strategies that are made in the block read ahead as on accelerators."""

    def configure(prefetches_to_towers, **options):
        return real(prefetches_to_towers=to_towers, **options)

    real = base.TowerConfig
    with mock.patch.object(base, "TowerConfig", configure):
        yield


def strategy_of(towers, prefetch=False, **options):
    """A strategy that may read ahead as it does to accelerators."""
    with prefetching(prefetch):
        return kt.TowerStrategy(towers, **options)
