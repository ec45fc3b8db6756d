"""``kt.explain``: what it says of steps, and that it leaves no trace."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_towers as kt
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.inspection.conformance.outcomes import Originals
from tests.explained.steps import FOLDER, STEPS, VERSIONS, explained, file_of
from tests.inspection.test_verification import OwnStep, compiled, drawn
from tests.kit import gpus
from tests.kit.compare import assert_all_close
from tests.kit.training import X, Y, fit, linear

pytestmark = pytest.mark.alternate


@pytest.mark.skipif(bool(gpus.ON), reason="the files are of steps on CPUs")
@pytest.mark.parametrize("step", STEPS)
def test_the_file_of_a_step_says_what_it_does(step):
    """``python -m tests.explained`` writes the files anew."""
    written_by = (FOLDER / "versions.txt").read_text().strip()
    if written_by != VERSIONS:
        pytest.skip(f"other versions compute steps otherwise: {written_by}")
    assert (
        explained(step).splitlines() == file_of(step).read_text().splitlines()
    )


def normalized():
    large = layers.Dense(3000)
    return linear(large, layers.BatchNormalization(), layers.Dropout(0.3))


@pytest.mark.parametrize("weights", [None, "sharded"])
def test_a_model_is_as_before(weights):
    strategy = kt.TowerStrategy(2, weights=weights)
    model = normalized()
    fit(model)
    originals = Originals(model)
    variables = state_lib.collect(model).everything()
    values = [v.numpy() for v in variables]
    said = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        found = kt.explain(model, X, Y, batch_size=16, strategy=strategy)
        draws = drawn()
        said.append(str(found))
    assert said[0] == said[1]
    assert found.description == strategy.describe()
    keras.utils.set_random_seed(3)
    assert draws == drawn()
    originals.assert_back()
    assert_all_close(variables, values, 0)


def test_a_step_of_ones_own_is_traced_but_not_run():
    model = compiled(OwnStep())
    said = str(kt.explain(model, X, X[:, :3], strategy=kt.TowerStrategy(2)))
    assert model.plain.numpy() == 1.0
    assert ": self.plain.assign(2.0)\n" in said


def eager():
    model = linear()
    model.run_eagerly = True
    return model


@pytest.mark.parametrize(
    ("make", "data", "strategy", "message"),
    [
        (lambda: keras.Sequential(), (X, Y), None, "explain takes a compiled"),
        (eager, (X, Y), None, "runs eagerly, .* leave out run_eagerly=True"),
        (linear, (X, Y), kt.NoOpStrategy, "divides no step"),
        (linear, (X, Y), lambda: kt.TowerStrategy(1), "divides no step"),
        (linear, (X, Y), lambda: kt.AsyncTowerStrategy(2), "divides no step"),
    ],
)
def test_wrong_arguments_are_refused(make, data, strategy, message):
    with pytest.raises(kt.TowerError, match=message):
        kt.explain(make(), *data, strategy=strategy and strategy())


@pytest.mark.parametrize(("batch_size", "said"), [(None, "n"), (8, "8")])
def test_the_head_says_which_batch_its_shapes_are_of(batch_size, said, capsys):
    given = keras.Input((3,), batch_size=batch_size)
    model = keras.Model(given, layers.Dense(2)(given))
    model.compile("sgd", "mse")
    # Of these, the last batch has fewer, which only one of the models takes.
    rows = 15 if batch_size is None else 16
    x, y = np.ones((rows, 3)), np.ones((rows, 2))
    found = kt.explain(model, x, y, batch_size=8, strategy=kt.TowerStrategy(2))
    head, *lines = found.program
    assert head.endswith(f", for {said} examples in the global batch")
    assert any(f"rows float32[{said}, 2]" in line for line in lines)
    # What it is for is said in the text, and not before it as well.
    assert not capsys.readouterr().err
