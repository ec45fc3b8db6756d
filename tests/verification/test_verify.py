"""What verify says of miniatures of well-known models."""

import keras
import pytest
from keras import layers

import keras_towers as kt
from keras_towers.verification import Kind
from tests.kit.long import long_but
from tests.verification import coupled as c
from tests.verification import models as m

X, Y = m.FEATURES, m.TARGETS
XENT = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def verify(model, *data, **options):
    return kt.verify(model, *data, batch_size=8, **options)


def own(cls):
    return m.compiled(cls(), None)


class Jitter(layers.Layer):
    """Adds the same draw to all values."""

    def call(self, x):
        return x + keras.random.uniform((), seed=3)


SAFE = {
    "a-scalar-is-drawn": lambda: (
        m.compiled(keras.Sequential([Jitter(), m.classifier()])),
        X,
        Y,
    ),
    "dense": lambda: (m.compiled(m.classifier(), metrics=["mae"]), X, Y),
    "sum": lambda: (
        m.compiled(m.classifier(), keras.losses.MeanSquaredError("sum")),
        X,
        Y,
    ),
    "weighted-mean": lambda: (
        m.compiled(
            m.classifier(),
            keras.losses.MeanSquaredError("mean_with_sample_weight"),
        ),
        X,
        Y,
        m.WEIGHTS,
    ),
    "sample-weights": lambda: (
        m.compiled(m.classifier(), XENT, weighted_metrics=["accuracy"]),
        X,
        m.LABELS,
        m.WEIGHTS,
    ),
    "clipnorm": lambda: (
        m.compiled(
            m.classifier(),
            optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.01),
        ),
        X,
        Y,
    ),
    "loss-scale": lambda: (
        m.compiled(
            m.classifier(),
            optimizer=keras.optimizers.LossScaleOptimizer(m.adam()),
        ),
        X,
        Y,
    ),
    "accumulation": lambda: (
        m.compiled(
            m.classifier(),
            optimizer=keras.optimizers.SGD(
                0.1, momentum=0.9, gradient_accumulation_steps=2
            ),
        ),
        X,
        Y,
    ),
    "masks": lambda: (m.compiled(m.gpt(), XENT), m.TOKENS, m.TOKEN_LABELS),
    "synchronized": lambda: (
        m.compiled(m.classifier(layers.BatchNormalization(synchronized=True))),
        X,
        Y,
    ),
    "vq-vae": lambda: (
        m.compiled(
            keras.Sequential(
                [
                    keras.Input((6,)),
                    layers.Dense(4),
                    m.VectorQuantizer(),
                    layers.Dense(3),
                ]
            )
        ),
        X,
        Y,
    ),
    "triplets": lambda: (own(m.Triplets), (X, X + 0.1, X[::-1].copy())),
    "cyclegan": lambda: (_cyclegan(), {"x": X, "y": X[::-1].copy()}),
    "own-step": lambda: (own(m.MSE), X, Y),
}


def _cyclegan():
    model = m.CycleGAN()
    model.compile()
    return model


def _gan(cls):
    model = cls()
    model.compile()
    return model


@pytest.mark.parametrize("name", SAFE)
def test_safe(name):
    report = verify(*SAFE[name]())
    assert report.safe, str(report)
    assert "safe to split" in str(report)
    assert not report.remedies


# Their draws differ, and nothing else.
DRAWING = {
    "vae": lambda: (own(m.VAE), X),
    "dcgan": lambda: (_gan(m.GAN), X),
    "wgan-gp": lambda: (_gan(m.WGAN), X),
    "ddim": lambda: (own(m.DDIM), X),
    "dropout": lambda: (m.compiled(m.classifier(layers.Dropout(0.3))), X, Y),
    "noise": lambda: (
        m.compiled(m.classifier(layers.GaussianNoise(0.3))),
        X,
        Y,
    ),
}


@pytest.mark.parametrize(
    "name", long_but(("vae", "wgan-gp", "dropout").__contains__, DRAWING)
)
def test_only_draws_differ(name):
    report = verify(*DRAWING[name]())
    assert kinds(report) == [Kind.RANDOM], str(report)
    assert 'random="global"' in report.remedies[0]


def kinds(report):
    return sorted(finding.kind for finding in report.findings)


def _simclr_with(layer):
    model = c.SimCLR()
    model.body = keras.Sequential([layers.Dense(8), layer, layers.Dense(4)])
    return m.compiled(model, None), X


def _dropping_simclr():
    return _simclr_with(layers.Dropout(0.3))


def _normalizing_simclr():
    return _simclr_with(layers.BatchNormalization())


def _stateful():
    return keras.Sequential(
        [
            keras.Input(batch_shape=(8, 4, 6)),
            layers.LSTM(5, stateful=True),
            layers.Dense(3),
        ]
    )


def _fixed():
    x = keras.Input(batch_shape=(8, 6))
    return keras.Model(x, layers.Dense(3)(keras.ops.reshape(x, (8, 6))))


UNSAFE = {
    "simclr": (lambda: (own(c.SimCLR), X), [Kind.COUPLES]),
    "barlow": (lambda: (own(c.Barlow), X), [Kind.COUPLES]),
    "supervised": (
        lambda: (own(c.SupervisedContrastive), X, m.LABELS),
        [Kind.COUPLES],
    ),
    "nnclr": (lambda: (own(c.NNCLR), X), [Kind.COUPLES, Kind.STATE]),
    "switch": (lambda: (own(c.Switch), X, Y), [Kind.COUPLES]),
    "masked-mean": (
        lambda: (own(c.MaskedMean), X, Y, m.MASK),
        [Kind.COUPLES],
    ),
    "penalty": (lambda: (own(c.BatchMeanPenalty), X, Y), [Kind.COUPLES]),
    "clipping": (lambda: (own(c.Clipping), X, Y), [Kind.CHANGED_BY_HAND]),
    "sam": (lambda: (own(c.SAM), X, Y), [Kind.CHANGED_BY_HAND]),
    "simclr-clipping": (
        lambda: (own(c.ClippingSimCLR), X),
        [Kind.CHANGED_BY_HAND, Kind.COUPLES],
    ),
    "sum": (lambda: (own(c.SSE), X, Y), [Kind.SUM]),
    "added-sum": (
        lambda: (m.compiled(m.classifier(c.AddsSum())), X, Y),
        [Kind.SUM],
    ),
    "batch-norm": (
        lambda: (
            m.compiled(m.classifier(layers.BatchNormalization())),
            X,
            Y,
        ),
        [Kind.BATCH_NORM],
    ),
    "batch-norm-dropout": (
        lambda: (
            m.compiled(
                m.classifier(layers.BatchNormalization(), layers.Dropout(0.3))
            ),
            X,
            Y,
        ),
        [Kind.BATCH_NORM, Kind.RANDOM],
    ),
    "plain-variable": (
        lambda: (own(c.WritesPlainVariable), X, Y),
        [Kind.PLAIN_VARIABLE],
    ),
    "averages": (
        lambda: (own(c.Averages), X, Y),
        [Kind.PLAIN_VARIABLE, Kind.STATE],
    ),
    "counter": (lambda: (own(c.CountsExamples), X, Y), [Kind.STATE]),
    "log": (lambda: (own(c.LogsMaximum), X, Y), [Kind.LOG]),
    "dropout-simclr": (_dropping_simclr, [Kind.COUPLES, Kind.RANDOM]),
    "updates": (lambda: (own(c.UpdatesSometimes), X, Y), [Kind.UPDATES]),
    "batch-norm-simclr": (_normalizing_simclr, [Kind.BATCH_NORM, Kind.COUPLES]),
    "fails": (lambda: (own(c.NeedsPairs), X, Y), [Kind.FAILS]),
    "stateful": (
        lambda: (m.compiled(_stateful()), m.WALKS, Y),
        [Kind.STATEFUL],
    ),
    "fixed": (
        lambda: (m.compiled(_fixed()), X, Y),
        [Kind.FIXED_BATCH],
    ),
}


# Losses that couple as another one does, and pairs of what is also alone.
REPEATS = (
    "barlow",
    "supervised",
    "simclr-clipping",
    "batch-norm-dropout",
    "batch-norm-simclr",
    "dropout-simclr",
)


@pytest.mark.parametrize(
    "name", long_but(lambda name: name not in REPEATS, UNSAFE)
)
def test_unsafe(name):
    make, expected = UNSAFE[name]
    report = verify(*make())
    assert kinds(report) == sorted(expected), str(report)
    assert not report.safe
