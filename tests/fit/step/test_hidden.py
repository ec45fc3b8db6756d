"""Steps that need static numbers of rows, with random="global"."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit import told
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.long import long_but
from tests.kit.training import X, Y

BATCH = 12


class Applied(layers.Layer):
    """Any function of the inputs and a seed."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        return self.function(x, self.seed)

    def compute_output_shape(self, shape):
        return shape


def _noise_of(shape_of):
    return lambda x, seed: x + keras.random.normal(shape_of(x), seed=seed)


CASES = {
    "noise": _noise_of(lambda x: x.shape),
    "noise for each": _noise_of(lambda x: (x.shape[0], 1)),
    "noise, one for all": _noise_of(lambda x: (1, 6 if x.shape[0] else 0)),
    "zeros": lambda x, seed: x + tf.zeros(x.shape),
    "range": lambda x, seed: (
        x * tf.cast(tf.range(x.shape[0]) < 99, tf.float32)[:, None]
    ),
    "several uses": lambda x, seed: tf.reshape(
        tf.reshape(x, (x.shape[0], 3, 2)) + tf.ones((x.shape[0], 1, 2)),
        (x.shape[0], 6),
    ),
}


def _making(function, *more, **options):
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input(batch_shape=(BATCH, 6)),
                Applied(function),
                *(layer() for layer in more),
                layers.Dropout(0.4, seed=2),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(m.momentum(), loss, **options)
        return model

    return make


def _fixed(count=48):
    data = tf.data.Dataset.from_tensor_slices((X[:count], Y[:count]))
    return data.batch(BATCH, drop_remainder=True)


def _fit(model):
    return model.fit(_fixed(), epochs=2, verbose=0).history


def _other_methods(model):
    logs = [model.train_on_batch(X[i : i + 12], Y[i : i + 12]) for i in (0, 12)]
    scores = model.evaluate(_fixed(), verbose=0)
    tested = model.test_on_batch(X[:12], Y[:12])
    predicted = model.predict_on_batch(X[:12])
    return logs, scores, tested, predicted, model.predict(_fixed(), verbose=0)


@pytest.fixture(autouse=True)
def warned(caplog, monkeypatch):
    """The warnings of a test, each of which is logged once in a process."""
    monkeypatch.setattr(told, "_said", set())
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.levelname == "WARNING" and r.name == "keras_towers"
    ]


@pytest.mark.parametrize("act", [_fit, _other_methods])
@pytest.mark.parametrize(
    "name, towers",
    long_but(
        lambda case: case[0] in ("noise", "several uses") or case[1] == 2,
        [(name, towers) for name in CASES for towers in (2, 3)],
    ),
)
def test_static_shapes(name, towers, act, warned):
    strategy = kt.TowerStrategy(towers, exact=True)
    assert_exact(_making(CASES[name]), act, strategy)
    assert any("static numbers of rows" in text for text in warned())


def test_of_batches_that_do_not_divide():
    """Each has a trace of its own, also the last one."""
    strategy = kt.TowerStrategy(5, exact=True)
    make = _making(CASES["noise"], lambda: layers.Dense(4))
    assert_exact(make, _fit, strategy)


def test_steps_per_execution():
    make = _making(CASES["noise"], steps_per_execution=2)
    assert_exact(make, _fit, kt.TowerStrategy(2, exact=True))


def test_what_needs_no_static_shape_is_known_for_sure(warned):
    make = _making(_noise_of(keras.ops.shape))
    assert_exact(make, _fit, kt.TowerStrategy(2, exact=True))
    assert not any("static numbers" in text for text in warned())


def test_several_rows_for_each_example_are_said(warned):
    def views(x, seed):
        noise = keras.random.normal((2 * x.shape[0], 6), seed=seed)
        return x + noise[: x.shape[0]]

    with kt.TowerStrategy(2, exact=True):
        _fit(_making(views)())
    assert any("differs from one device" in text for text in warned())


def test_errors_are_those_of_the_step():
    def wrong(x, seed):
        raise ValueError(f"wrong for {x.shape[0]} rows")

    with (
        pytest.raises(ValueError, match="wrong for"),
        kt.TowerStrategy(2, exact=True),
    ):
        _fit(_making(lambda x, s: x if x.shape[0] == 12 else wrong(x, s))())
