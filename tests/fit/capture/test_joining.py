"""exact=True exchanges what towers need of one another."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact

X, Y = m.FEATURES[:13], m.LABELS[:13]


class Standardized(keras.layers.Layer):
    """The statistics of a batch, by hand."""

    def call(self, inputs):
        apart = inputs - tf.reduce_mean(inputs, 0)
        return apart * tf.math.rsqrt(tf.reduce_mean(apart**2, 0) + 0.1)


class Attending(keras.layers.Layer):
    """Examples attend to examples, and stay rows of the tower."""

    def call(self, inputs):
        scores = tf.nn.softmax(inputs @ tf.transpose(inputs))
        return inputs + scores @ inputs


def masked_mean(labels, scores):
    mask = tf.cast(tf.reshape(labels, [-1, 1]) > 0, scores.dtype)
    total = tf.reduce_sum(mask * tf.square(scores - 1))
    return total / tf.maximum(tf.reduce_sum(mask), 1)


def sum_by_share(labels, scores):
    """A sum, which nothing takes but the step."""
    errors = tf.abs(scores - tf.cast(tf.reshape(labels, [-1, 1]), tf.float32))
    shares = tf.stop_gradient(errors / tf.reduce_sum(errors))
    return tf.reduce_sum(shares * errors)


def contrastive(labels, scores):
    """Supervised: examples with one label attract one another."""
    scores = tf.math.l2_normalize(scores, 1)
    likeness = scores @ tf.transpose(scores) / 0.5
    labels = tf.reshape(labels, [-1, 1])
    alike = tf.cast(tf.equal(labels, tf.transpose(labels)), scores.dtype)
    logits = likeness - tf.reduce_logsumexp(likeness, 1, keepdims=True)
    return -tf.reduce_sum(alike * logits, 1) / tf.reduce_sum(alike, 1)


def covariances(labels, scores):
    """Of features, by one example less than there are."""
    scores = scores - tf.reduce_mean(scores, 0)
    count = tf.cast(tf.shape(scores)[0], scores.dtype)
    covariance = tf.transpose(scores) @ scores / (count - 1)
    return tf.reduce_sum(tf.square(covariance - tf.eye(3)))


def _made(*layers, loss=m.cross_entropy):
    def make():
        keras.utils.set_random_seed(1)
        more = [layer() for layer in layers]
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), *more]
        )
        model.add(keras.layers.Dense(3))
        made = loss() if loss is m.cross_entropy else loss
        model.compile(m.momentum(), made, jit_compile=False)
        return model

    return make


def act(model):
    # The last batch has an example for one tower only.
    fit = model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return fit.history, model.evaluate(X[:6], Y[:6], verbose=0)


CASES = {
    "statistics": _made(Standardized),
    "masked mean": _made(loss=masked_mean),
    "sum": _made(loss=sum_by_share),
    "contrastive": _made(loss=contrastive),
    "covariances": _made(loss=covariances),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(name, logged):
    make, strategy = CASES[name], kt.TowerStrategy(2, exact=True)
    assert_exact(make, act, strategy, tolerance=2e-5)
    assert not logged("step of")
    assert strategy.describe().count("with values of all towers for") == 2


PAIRS = "combines every example with every other"


@pytest.mark.parametrize(
    ("make", "options", "wanted"),
    [
        (CASES["contrastive"], {}, PAIRS),
        # It would need all rows of everything.
        (_made(Attending), {"exact": True}, PAIRS),
        (CASES["masked mean"], {"exact": True}, "takes Maximum of a sum"),
    ],
)
def test_what_is_not_exchanged_is_told(
    make, options, wanted, logged, monkeypatch
):
    if wanted != PAIRS:
        monkeypatch.setattr(kt.settings, "JOINING_TRACES", 0)
    with kt.TowerStrategy(2, **options):
        make().train_on_batch(X[:6], Y[:6])
    assert logged(wanted)


@pytest.mark.parametrize("exact", [False, True])
def test_predictions_are_analysed(exact, logged):
    model, strategy = _made(Standardized)(), kt.TowerStrategy(2, exact=exact)
    wanted = model.predict(X, batch_size=6, verbose=0)
    with strategy:
        found = model.predict(X, batch_size=6, verbose=0)
    assert np.allclose(found, wanted, atol=2e-5) is exact
    said = logged("the prediction step of")
    assert bool(said) is not exact
    assert "outputs" in str(said) or exact
