"""What a step writes by itself is what one device would have written."""

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.step import written
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y

STRATEGIES = {
    "towers-3": lambda: kt.TowerStrategy(3),
    "towers-8": lambda: kt.TowerStrategy(8),
    "each": lambda: kt.TowerStrategy(3, updates="each"),
    "servers": lambda: kt.ParameterServerTowerStrategy(3),
}


def trained(model):
    # The last batch is smaller than eight towers.
    history = model.fit(
        X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0
    ).history
    return history, getattr(model, "state", list)()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", written.CASES)
def test_graph(name, strategy):
    make = written.made(written.CASES[name])
    assert_exact(make, trained, STRATEGIES[strategy](), tolerance=5e-6)


@pytest.mark.parametrize("strategy", ["towers-3", "servers"])
@pytest.mark.parametrize("name", ["Clipping", "Counting", "Native", "Target"])
def test_eager(name, strategy):
    make = written.made(written.CASES[name], run_eagerly=True)
    assert_exact(make, trained, STRATEGIES[strategy](), tolerance=5e-6)


@pytest.mark.parametrize("name", written.CASES)
def test_steps_per_execution(name):
    make = written.made(written.CASES[name], steps_per_execution=3)
    assert_exact(make, trained, kt.TowerStrategy(3), tolerance=5e-6)


def test_native_variables_are_ordinary_afterwards(caplog):
    model = written.made(written.Native)()
    with kt.TowerStrategy(2):
        trained(model)
        # Written outside of a step, it has the value on every tower.
        model.steps.assign(100)
        trained(model)
    assert model.steps.numpy() == 110
    model.steps.assign_add(1)
    np.testing.assert_array_equal(model.steps.numpy(), 111)
    assert "tf.Variable 'steps'" in caplog.text


def test_a_native_sum_is_refused():
    model = written.made(written.Native)()
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, name="n")
    model.after = lambda x, p: total.assign_add(1.0)
    with (
        pytest.raises(kt.TowerError, match="'n'.*keras.Variable"),
        kt.TowerStrategy(2),
    ):
        trained(model)


def test_changing_batch_sizes():
    batches = [12, 5, 3, 12, 7, 7, 2, 8]

    def act(model):
        start, history = 0, []
        for size in batches:
            x, y = X[start : start + size], Y[start : start + size]
            history.append(model.train_on_batch(x, y))
            start = (start + size) % 40
        return history

    make = written.made(written.BatchMeans)
    assert_exact(make, act, kt.TowerStrategy(3), tolerance=5e-6)
