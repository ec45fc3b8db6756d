"""``keras.utils.clear_session`` inside a block and between blocks."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import close, same_model
from tests.kit.long import long_but
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, classifier, fit

EXACT = [kt.TowerStrategy, kt.ParameterServerTowerStrategy]
STRATEGIES = [*EXACT, kt.AsyncTowerStrategy]


def kept(strategy):
    # The others do in a scope what this one does.
    return strategy is kt.TowerStrategy


each = pytest.mark.parametrize("strategy", long_but(kept, STRATEGIES))


@pytest.fixture(autouse=True)
def nothing_left():
    """What is made after the block knows nothing of the strategy."""
    yield
    assert not tf.distribute.has_strategy()
    for variable in (tf.Variable(1.0), keras.Variable(1.0).value):
        assert not isinstance(variable, tf.distribute.DistributedValues)
        assert not hasattr(variable, "_distributed_container")
    assert not tf.compat.v1.get_default_graph()._distribution_strategy_stack


@each
def test_the_scope_goes_on(strategy, variables_on_towers):
    with strategy(2) as towers:
        for _ in range(2):
            keras.utils.clear_session()
            assert tf.distribute.get_strategy() is towers
            assert tf.distribute.in_cross_replica_context()
        model = classifier()
        assert np.isfinite(fit(model)["loss"]).all()
        assert variables_on_towers()
        keras.utils.clear_session()
        assert np.isfinite(fit(model)["loss"]).all()
    assert not variables_on_towers()
    assert_ordinary(model)


@pytest.mark.parametrize("strategy", long_but(kept, EXACT))
def test_models_from_before_and_after_it_train_exactly(strategy):
    references = [classifier(), classifier(), classifier()]
    wanted = [fit(reference, 2) for reference in references]
    outside = classifier()
    with strategy(3):
        before = classifier()
        found = [fit(model) for model in (outside, before)]
        keras.utils.clear_session()
        after = classifier()
        rest = [fit(model) for model in (outside, before)]
        found = [
            {name: first[name] + then[name] for name in first}
            for first, then in zip(found, rest, strict=True)
        ]
        found.append(fit(after, 2))
        close(after.predict(X, verbose=0), references[0].predict(X, verbose=0))
    for mine, reference in zip(found, wanted, strict=True):
        assert mine.keys() == reference.keys()
        for name, values in reference.items():
            close(mine[name], values)
    for model, reference in zip(
        (outside, before, after), references, strict=True
    ):
        same_model(model, reference)
        assert_ordinary(model)


@each
def test_a_model_that_was_dropped_is_freed_inside(strategy):
    with strategy(2):
        models = [classifier() for _ in range(2)]
        dropped = [weakref.ref(model) for model in models]
        dropped += [weakref.ref(model.optimizer) for model in models]
        dropped += [weakref.ref(model.weights[0].value) for model in models]
        for model in models:
            fit(model)
        del model
        models.clear()
        keras.utils.clear_session()
        gc.collect()
        assert [reference() for reference in dropped] == [None] * 6
        fit(classifier())


@each
def test_an_error_ends_the_block_as_ever(strategy):
    model = classifier()
    with pytest.raises(KeyError, match="mine"), strategy(2):
        fit(model)
        keras.utils.clear_session()
        raise KeyError("mine")
    assert_ordinary(model)


@pytest.mark.parametrize("strategy", long_but(kept, EXACT))
def test_between_blocks(strategy):
    reference, model = classifier(), classifier()
    fit(reference, 3)
    towers = strategy(2)
    for block in (towers, towers, strategy(3)):
        with block:
            fit(model)
        keras.utils.clear_session()
    same_model(model, reference)
    assert_ordinary(model)
