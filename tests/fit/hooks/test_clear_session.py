"""``keras.utils.clear_session`` inside a block and between blocks."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.one_device import trained
from tests.kit.compare import assert_close, assert_same_model
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, fit, linear


@pytest.fixture(autouse=True)
def nothing_left():
    """Variables made after the block know nothing of the strategy."""
    yield
    assert not tf.distribute.has_strategy()
    for variable in (tf.Variable(1.0), keras.Variable(1.0).value):
        assert not isinstance(variable, tf.distribute.DistributedValues)
        assert not hasattr(variable, "_distributed_container")
    assert not tf.compat.v1.get_default_graph()._distribution_strategy_stack


def test_models_from_before_and_after_clear_session_train_exactly(
    variables_on_towers,
):
    outside, reference = linear(), trained(2)
    losses = [trained(fits).history.history["loss"] for fits in (1, 2)]
    with kt.TowerStrategy(2) as towers:
        inside = linear()
        for model in (outside, inside):
            assert_close(fit(model)["loss"], losses[0])
        for _ in range(2):
            keras.utils.clear_session()
            assert tf.distribute.get_strategy() is towers
            assert tf.distribute.in_cross_replica_context()
        after = linear()
        for model in (outside, inside):
            assert_close(fit(model)["loss"], losses[1])
        for wanted in losses:
            assert_close(fit(after)["loss"], wanted)
        assert_close(
            after.predict(X, verbose=0), reference.predict(X, verbose=0)
        )
    assert not variables_on_towers()
    for model in (outside, inside, after):
        assert_same_model(model, reference)
        assert_ordinary(model, trains_on_towers=model is not outside)


def test_clear_session_between_blocks():
    """Also of one strategy; an error ends the block as ever."""
    model = linear()
    towers = kt.TowerStrategy(2)
    for block in (towers, towers, kt.TowerStrategy(3)):
        with pytest.raises(KeyError, match="mine"), block:
            fit(model)
            keras.utils.clear_session()
            raise KeyError("mine")
        keras.utils.clear_session()
    assert_same_model(model, trained(3))
    assert_ordinary(model)
