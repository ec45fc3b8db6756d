"""exact=True exchanges what towers need of one another."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step.acts import Acts
from tests.kit.compare import assert_exact
from tests.kit.training import fit, stacked

X, Y = m.FEATURES[:13], m.LABELS[:13]


def standardized(x):
    """By the statistics of the batch, by hand."""
    apart = x - tf.reduce_mean(x, 0)
    return apart * tf.math.rsqrt(tf.reduce_mean(apart**2, 0) + 0.1)


def attending(x):
    """Examples attend to examples, and stay rows of the tower."""
    return x + tf.nn.softmax(x @ tf.transpose(x)) @ x


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


def _made(act=tf.identity, **options):
    dense = keras.layers.Dense
    return stacked(
        lambda: [dense(4), Acts(act), dense(3)],
        metrics=list,
        jit_compile=False,
        **options,
    )


def act(model):
    # The last batch has an example for one tower only.
    history = fit(model, 2, X, Y, 6)
    return history, model.evaluate(X[:6], Y[:6], verbose=0)


CASES = {
    "statistics": _made(standardized),
    "masked mean": _made(loss=lambda: masked_mean),
    "sum": _made(loss=lambda: sum_by_share),
    "contrastive": _made(loss=lambda: contrastive),
    "covariances": _made(loss=lambda: covariances),
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
        (_made(attending), {"exact": True}, PAIRS),
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
    model, strategy = _made(standardized)(), kt.TowerStrategy(2, exact=exact)
    wanted = model.predict(X, batch_size=6, verbose=0)
    with strategy:
        found = model.predict(X, batch_size=6, verbose=0)
    assert np.allclose(found, wanted, atol=2e-5) is exact
    said = logged("the prediction step of")
    assert bool(said) is not exact
    assert "outputs" in str(said) or exact
