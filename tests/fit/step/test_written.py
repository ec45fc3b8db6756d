"""A step writes the same state as on one device."""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.step import written
from tests.kit.compare import assert_exact
from tests.kit.sampling import sample_of
from tests.kit.training import X, Y, fit

pytestmark = pytest.mark.alternate


def trained(model):
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    # The last batch has 2 examples: none for a third tower.
    history = fit(model, 1, X[:50], Y[:50], 12, callbacks=[note])
    return history, seen, model.state()


@pytest.mark.parametrize(
    "make_strategy, options",
    sample_of(
        [
            (kt.TowerStrategy, {}),
            (functools.partial(kt.TowerStrategy, updates="each"), {}),
            (kt.TowerStrategy, {"run_eagerly": True}),
            (kt.ParameterServerTowerStrategy, {}),
        ]
    ),
)
def test_native_variables_are_ordinary_between_steps_and_afterwards(
    make_strategy, options
):
    def act(model):
        before = trained(model)
        model.steps.assign(100)
        model.mean.assign(tf.ones_like(model.mean))
        return before, trained(model)

    make = written.made(**options)
    model = assert_exact(make, act, make_strategy(3), tolerance=5e-6).model
    model.steps.assign_add(1)
    assert model.steps.numpy() == 106
