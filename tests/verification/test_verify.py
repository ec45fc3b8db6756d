"""What verify says of miniatures of well-known models."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_towers as kt
from keras_towers.fit.capture import splits
from keras_towers.splitting import Analysis
from keras_towers.verification import Kind
from tests.exactness import coupled as c
from tests.exactness import models as e
from tests.kit.long import some_of
from tests.verification import models as m

X, Y = m.FEATURES, m.TARGETS


def verify(model, *data, steps=1, **options):
    if len(data) != 1 or isinstance(data[0], (np.ndarray, dict)):
        options["batch_size"] = 8
    return kt.verify(model, *data, steps=steps, **options)


class AddsLoss(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.01 * self.reduce(x**2))
        return x


class Sums(m.MSE):
    """Learns from the sum of each example's numbers."""

    def loss_of(self, data):
        sums = tf.reduce_sum(data[0], axis=1, keepdims=True)
        return super().loss_of((sums, data[1]))


def _ragged():
    rows = tf.ragged.constant([[1.0] * (1 + k % 5) for k in range(m.ROWS)])
    data = tf.data.Dataset.from_tensor_slices((rows, Y)).batch(7)
    return m.own(Sums), data


def _two_headed():
    model = e.two_headed()
    losses = {
        "label": e.cross_entropy(reduction="mean_with_sample_weight"),
        "target": keras.losses.MeanSquaredError("sum"),
    }
    metrics = {"target": ["mae"]}
    model.compile("adam", losses, metrics=metrics, weighted_metrics=metrics)
    x = {"features": X, "tokens": e.TOKENS[: m.ROWS]}
    y = {"label": m.LABELS, "target": e.TARGETS[: m.ROWS]}
    return model, x, y, dict.fromkeys(y, m.WEIGHTS)


def _plain(loss="mse", **options):
    return m.compiled(m.classifier(), loss, **options)


def _weighted_batches():
    for start in range(0, m.ROWS, 8):
        rows = slice(start, start + 8)
        yield X[rows], Y[rows], m.WEIGHTS[rows]


def _with(*middle):
    return m.compiled(m.classifier(*middle)), X, Y


SGD = keras.optimizers.SGD
SAFE = {
    "generator": lambda: (_plain(), _weighted_batches()),
    "clipped, scaled, accumulated": lambda: (
        _plain(
            optimizer=keras.optimizers.LossScaleOptimizer(
                SGD(0.1, global_clipnorm=0.01, gradient_accumulation_steps=2)
            )
        ),
        *(X, Y),
    ),
    "mask": lambda: (
        m.compiled(e.with_mask(), e.cross_entropy()),
        *(e.SENTENCES[: m.ROWS], e.SENTENCE_LABELS[: m.ROWS]),
    ),
    "layers": lambda: _with(
        layers.BatchNormalization(synchronized=True),
        AddsLoss(ops.mean),
    ),
    "two heads": _two_headed,
    "gan": lambda: (e.gan(), X),
    "ragged": _ragged,
}


@pytest.mark.parametrize("name", some_of(SAFE))
def test_safe(name):
    steps = 3 if "accumulated" in name else 1
    report = verify(*SAFE[name](), steps=steps)
    assert report.verdict == "proven", str(report)
    assert report.safe
    assert "safe to split" in str(report)
    assert not report.remedies


# What is not proven; the rehearsal finds nothing.
EQUAL = {
    "eager": lambda: (_plain(run_eagerly=True, metrics=["mae"]), X, Y),
    "unknown": lambda: _with(layers.Lambda(tf.math.special.bessel_j0)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_not_proven_is_rehearsed(name):
    report = verify(*EQUAL[name]())
    assert all(f.difference is None for f in report.findings), str(report)
    assert report.verdict == "rehearsed"
    assert report.safe
    assert "not proven" in str(report)


def test_a_step_that_is_wrongly_proven_is_told_first(monkeypatch):
    proven = Analysis((), (), (), frozenset(), 0, {})
    monkeypatch.setattr(splits, "analyse", lambda *args: proven)
    for model, expected in (
        (m.own(Writes), [Kind.LOG, Kind.STATE]),
        (m.own(m.Clipping), [Kind.GRADIENT]),
    ):
        report = verify(model, X, Y)
        first = report.findings[: len(expected)]
        assert [finding.kind for finding in first] == expected, str(report)
        assert not report.unproven
        for finding in first:
            assert "defect of keras_towers" in finding.message
            assert finding.difference > 1e-3


def test_only_draws_differ():
    model = m.own(m.VAE)
    report = verify(model, X, random="tower")
    assert m.kinds(report) == [Kind.RANDOM], str(report)
    assert 'random="tower"' in report.remedies[0]
    report = verify(model, X)
    assert report.safe, str(report)


class Writes(m.MSE):
    """Writes and logs what is no mean over the examples."""

    def __init__(self):
        super().__init__()
        self.plain = tf.Variable(0.0, trainable=False)
        self.seen = self.scalar()

    def train_step(self, data):
        x = data[0]
        self.plain.assign_add(tf.reduce_sum(x))
        self.seen.assign(self.seen + ops.cast(ops.shape(x)[0], "float32"))
        return {**super().train_step(data), "largest": ops.max(x)}


class UpdatesSometimes(m.MSE):
    """Updates weights twice for a large batch."""

    def train_step(self, data):
        if int(ops.shape(data[0])[0]) >= 8:
            super().train_step(data)
        return super().train_step(data)


class NeedsPairs(m.MSE):
    def loss_of(self, data):
        if int(ops.shape(data[0])[0]) < 8:
            raise ValueError("a batch needs 8 rows")
        return super().loss_of(data)


def _stateful():
    return keras.Sequential(
        [
            keras.Input(batch_shape=(8, 4, 3)),
            layers.LSTM(5, stateful=True),
            layers.Dense(3),
        ]
    )


def _fixed():
    x = keras.Input(batch_shape=(8, 6))
    return keras.Model(x, layers.Dense(3)(ops.reshape(x, (8, 6))))


def _function():
    model = m.own(m.Clipping)
    model.train_step = tf.function(model.train_step)
    return model, X, Y


UNSAFE = {
    "sum": (lambda: (m.own(m.SSE), X, Y), Kind.GRADIENT, Kind.LOG),
    "added sum": (
        lambda: _with(AddsLoss(ops.sum)),
        *(Kind.GRADIENT, Kind.METRIC),
    ),
    "written": (
        lambda: (m.own(Writes), X, Y),
        *(Kind.LOG, Kind.STATE, Kind.STATE),
    ),
    "function": (_function, Kind.GRADIENT),
    "updates": (lambda: (m.own(UpdatesSometimes), X, Y), Kind.UPDATES),
    "fails": (lambda: (m.own(NeedsPairs), X, Y), Kind.FAILS),
    "stateful": (lambda: (m.compiled(_stateful()), m.WALKS, Y), Kind.STATEFUL),
    "fixed": (lambda: (m.compiled(_fixed()), X, Y), Kind.FIXED_BATCH),
}


@pytest.mark.parametrize("name", some_of(UNSAFE))
def test_unsafe(name):
    make, *expected = UNSAFE[name]
    report = verify(*make())
    assert m.kinds(report) == sorted(expected), str(report)
    assert report.verdict == "differs"
    assert not report.safe
    if "sum" in name:
        assert report.findings[0].difference > 1e-2
    if name == "sum":
        assert "average=False" in report.remedies[0]
        assert "models.py:" in report.findings[0].message


@pytest.fixture
def of_each_tower(monkeypatch):
    """What a step asks of all towers it gets of its own."""

    def mean(values, mask=None, axis=None):
        mask = 1.0 if mask is None else tf.cast(mask, values.dtype)
        total = tf.reduce_sum(tf.ones_like(values) * mask, axis)
        return tf.reduce_sum(values * mask, axis) / total

    with monkeypatch.context() as patch:
        patch.setattr(kt, "gather", lambda rows: rows)
        patch.setattr(kt, "mean", mean)
        patch.setattr(kt, "reduce_gradients", lambda gradients: gradients)
        patch.setattr(kt, "clip_by_global_norm", tf.clip_by_global_norm)
        yield patch


def _means(model, x, y):
    return c.masked_mean(model, x, y) + c.penalty_on_a_mean(model, x, y)


COUPLED = {
    "queue": (c.nnclr,),
    "means": (_means,),
    "sam": (c.plain, c.sharpness_aware),
    "simclr clipped": (c.simclr, c.clipped),
}


@pytest.mark.parametrize("name", some_of(COUPLED, part=3))
def test_what_couples_and_its_remedy(name, of_each_tower):
    made = COUPLED[name]
    report = verify(c.coupled(*made)(), X, m.LABELS)
    assert Kind.GRADIENT in m.kinds(report), str(report)
    assert (Kind.STATE in m.kinds(report)) == (name == "queue")
    of_each_tower.undo()
    report = verify(c.coupled(*made)(), X, m.LABELS)
    assert report.safe, str(report)


class Trained(c.Coupled):
    """With layers that do something else in training."""

    def __init__(self):
        super().__init__(c.simclr)
        middle = [layers.BatchNormalization(), layers.Dropout(0.3)]
        self.body = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), *middle, layers.Dense(4)]
        )

    def unit(self, x):
        return tf.math.l2_normalize(self.body(x, training=True), 1)


# On towers, too, these hide no other cause.
@pytest.mark.long
def test_several_causes_are_told_apart(of_each_tower):
    model = m.own(Trained)
    report = verify(model, X, m.LABELS, random="tower")
    assert m.kinds(report) == [Kind.BATCH_NORM, Kind.GRADIENT, Kind.RANDOM]
    of_each_tower.undo()
    report = verify(model, X, m.LABELS, exact=True)
    assert report.safe, str(report)
