"""The exactness contract: a case on towers is the case on one device."""

from keras_towers.inspection.conformance.cases import CASES
from keras_towers.inspection.conformance.strategy_check import on_one_device
from tests.kit.compare import assert_same, use_model


class _Parts:
    """Fits a model with batches of a fraction of the size."""

    def __init__(self, parts, model):
        self.parts = parts
        self.model = model

    def fit(self, *args, batch_size, **kwargs):
        size = batch_size // self.parts
        return self.model.fit(*args, batch_size=size, **kwargs)


def assert_contract(name, strategy, parts=1, xla=True):
    """Assert that a case trains on towers as on one device.

    Args:
        name: the case.
        strategy: the towers.
        parts: how many batches make one of one device.
        xla: whether XLA may compile the step, as it does by default.

    Returns:
        the outcome on the towers.
    """
    case = CASES[name]

    def build():
        model = case.build()
        model.jit_compile = model.jit_compile and xla
        return model

    found = use_model(
        build, lambda model: case.fit(_Parts(parts, model)), strategy
    )
    assert_same(found, on_one_device(case), case.tolerance)
    return found
