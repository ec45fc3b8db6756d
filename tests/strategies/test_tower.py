"""What a TowerStrategy says of itself, and what it does with one tower."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights.variables import TowerVariable
from tests.kit.compare import outcome
from tests.kit.training import fit, linear

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            {},
            "TowerStrategy: 8 towers (/device:CPU:0 to /device:CPU:7)|"
            "averaged over examples; weights are updated on tower 0|"
            "the global batch is split over the towers",
        ),
        (
            {"average": np.bool_(False), "batches": "each", "updates": "each"},
            "gradients are summed|every tower updates its own weights|"
            "every tower draws a whole batch",
        ),
        (
            {"towers": ["CPU:2"]},
            "TowerStrategy: 1 tower (/device:CPU:2)|"
            "one tower: nothing to reduce",
        ),
    ],
)
def test_describe(arguments, said):
    described = kt.TowerStrategy(**arguments).describe()
    for part in said.split("|"):
        assert part in described


@pytest.mark.parametrize("towers", [["CPU:2"], ["CPU:5", "CPU:1"]])
def test_one_tower_is_plain_keras(towers):
    strategy = kt.TowerStrategy(towers)
    alone = len(towers) == 1
    seen = []

    def act(model):
        def look(batch, logs):
            values = [v._value for v in model.variables]
            kinds = {issubclass(type(v), TowerVariable) for v in values}
            seen.append((tf.distribute.get_strategy() is strategy, kinds))

        watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        fit(model, callbacks=[watch])

    # It is an ordinary model, with the same variables, afterwards.
    outcome(linear, act, strategy)
    assert seen[0] == (not alone, {not alone})
