"""Models that are built, trained and dropped leave nothing in memory."""

import contextlib
import gc
import threading
import time
import weakref

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.kit.training import X, Y, fit, linear

pytestmark = pytest.mark.alternate


def _alive(*kinds):
    gc.collect()
    everything = gc.get_objects()
    return [
        sum(issubclass(type(item), kind) for item in everything)
        for kind in kinds
    ]


def test_no_threads_variables_and_graphs_are_left():
    model = linear()

    def blocks(number):
        for _ in range(number):
            with kt.TowerStrategy(2):
                model.train_on_batch(X[:8], Y[:8])
        return threading.active_count(), *_alive(tf.Variable, tf.Graph)

    first, later = blocks(2), blocks(2)
    assert all(more <= few for more, few in zip(later, first, strict=True))
    assert_ordinary(model)
    assert int(model.optimizer.iterations) == 4


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_on_towers_dies_with_its_last_reference(inside):
    with contextlib.ExitStack() as block:
        block.enter_context(kt.TowerStrategy(2))
        model = linear()
        held = (model, model.optimizer, model.weights[0].value)
        dropped = [weakref.ref(each) for each in held]
        fit(model)
        if not inside:
            block.close()
        del model, held
        keras.utils.clear_session()
        # It may take a moment until nothing holds them any more.
        until = time.monotonic() + 10
        while any(reference() for reference in dropped):
            assert time.monotonic() < until, [each() for each in dropped]
            gc.collect()
            time.sleep(0.05)
