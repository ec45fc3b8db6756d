"""What a TowerStrategy says of itself, and what it does with one tower."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import use_model
from tests.kit.training import fit, linear

pytestmark = pytest.mark.core


def test_describe_says_what_runs_and_what_changes_results():
    described = kt.TowerStrategy().describe()
    assert described.startswith("TowerStrategy: 8 towers (/device:CPU:0 to")
    for part in ("those of one device;", "updated on tower 0", "is split"):
        assert part in described
    assert "changes results" not in described
    tower = kt.TowerStrategy(2, batch_norm="tower").describe()
    assert 'batch_norm="tower" changes results' in tower
    other = kt.TowerStrategy(2, average=False, batches="each")
    for part in ("one device times 2", "every tower draws a whole batch"):
        assert part in other.describe()


@pytest.mark.parametrize("towers", [["CPU:2"], ["CPU:5", "CPU:1"]])
def test_one_tower_is_plain_keras(towers):
    strategy = kt.TowerStrategy(towers)
    alone = len(towers) == 1
    seen = []

    def act(model):
        def look(batch, logs):
            seen.append(tf.distribute.get_strategy() is strategy)

        watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        fit(model, callbacks=[watch])

    # It is an ordinary model, with the same variables, afterwards.
    use_model(linear, act, strategy)
    assert set(seen) == {not alone}
