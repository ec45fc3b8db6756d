"""What has no reference on one GPU to be equal to, or compares by itself."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.exactness import models as m
from tests.gpu.towers import strategy, towers
from tests.kit.compare import close
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import STEPS, X, Y, classifier, fit
from tests.strategies.test_async_steps import linear

pytestmark = pytest.mark.gpu


def test_asynchronous_towers_learn():
    model = classifier()
    labels = np.argmax(X[:, :3], 1)
    before = model.evaluate(X, labels, verbose=0)[0]
    with strategy(kt.AsyncTowerStrategy) as asynchronous:
        history = fit(model, 30, y=labels)
        assert asynchronous.staleness.max < 4 * len(towers())
    assert_ordinary(model)
    assert int(model.optimizer.iterations) == 30 * STEPS
    assert np.isfinite(history["loss"]).all()
    assert model.evaluate(X, labels, verbose=0)[0] < before


def test_asynchronous_gradients_add_up():
    # No gradient depends on the weights, so that their order does not matter.
    mine, alone = (linear(keras.optimizers.SGD(0.01)) for _ in range(2))
    labels = np.float32(Y)[:, None] + 1.0
    with strategy(kt.AsyncTowerStrategy, scale_gradient=False):
        fit(mine, 3, y=labels)
    fit(alone, 3, y=labels)
    # The losses do depend on them.
    for one, other in zip(mine.weights, alone.weights, strict=True):
        close(one, other, 1e-4)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    model = m.mlp(keras.layers.Dense(16, activation="relu"))
    model.compile("adam", m.cross_entropy())
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    labels = np.argmax(X[:, :3], 1)
    with strategy():
        losses = fit(model, 20, y=labels)["loss"]
    assert losses[-1] < losses[0]
    if scaled:
        broken = X.copy()
        broken[-1] = np.inf
        before = model.get_weights()
        scale = float(model.optimizer.dynamic_scale)
        with strategy():
            # Infinite on the last tower only.
            model.train_on_batch(broken, labels)
        assert float(model.optimizer.dynamic_scale) == scale / 2
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)


def test_verify():
    assert kt.verify(classifier(), X, Y).safe
    coupled = m.mlp(keras.layers.BatchNormalization())
    coupled.compile("sgd", m.cross_entropy())
    assert not kt.verify(coupled, X, Y).safe
    assert kt.verify(coupled, X, Y, batch_norm="global").safe
