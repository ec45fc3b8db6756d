"""What verify takes, refuses and leaves behind."""

import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers import compat
from keras_towers.fit.weights import state as state_lib
from keras_towers.verification import Kind
from tests.kit.long import some_of
from tests.verification import models as m

X, Y = m.FEATURES, m.TARGETS


def values(model):
    return [v.numpy() for v in state_lib.collect(model).everything()]


class Reads(m.MSE):
    """Raises on one device."""

    def loss_of(self, data):
        return data["nothing"]


class Counting(m.MSE):
    """A step that counts and collects in Python."""

    def __init__(self):
        super().__init__()
        self.steps, self.seen, self.plain = 0, {"rows": []}, tf.Variable(1.0)

    def train_step(self, data):
        self.steps += 1
        self.seen["rows"] = [*self.seen["rows"], data[0].shape[0]]
        self.plain.assign(2.0)
        return super().train_step(data)


def trained():
    """A model with every kind of state."""
    keras.utils.set_random_seed(1)
    model = m.compiled(
        m.classifier(layers.BatchNormalization(), layers.Dropout(0.3)),
        optimizer=keras.optimizers.Adam(0.01, use_ema=True),
        metrics=["mae"],
    )
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def replaced_names():
    return [
        compat.Function.__call__,
        compat.KerasVariable._initialize,
        keras.Model.fit,
        tf.config.functions_run_eagerly(),
        tf.get_logger().level,
    ]


def drawn():
    return random.random(), np.random.rand(), tf.random.normal(()).numpy()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (trained, [Kind.BATCH_NORM]),
        (lambda: m.own(Counting), [Kind.STATE]),
        (lambda: m.own(Reads), "fails on one device"),
    ],
    ids=["trained", "counting", "error"],
)
def test_everything_is_as_before(make, found):
    model = make()
    model(X[:1])
    before, attributes, names = (
        values(model),
        dict(vars(model)),
        replaced_names(),
    )
    keras.utils.set_random_seed(3)
    wanted = drawn()
    keras.utils.set_random_seed(3)
    if isinstance(found, str):
        with pytest.raises(kt.TowerError, match=found):
            kt.verify(model, X, Y, batch_size=8)
    else:
        report = kt.verify(model, X, Y, batch_size=8, steps=1)
        assert m.kinds(report) == found
    assert drawn() == wanted
    for a, b in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert vars(model) == attributes
    assert all(a is b for a, b in zip(names, replaced_names(), strict=True))
    if isinstance(model, Counting):
        assert (model.steps, model.seen) == (0, {"rows": []})
        assert model.plain.numpy() == 1.0


class Lazy(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)]
        )

    def call(self, x, training=None):
        return self.inner(x, training=training)


def test_a_new_model_trains_as_if_nothing_had_happened():
    weights = []
    for asks in (True, False):
        keras.utils.set_random_seed(1)
        model = m.compiled(Lazy(), metrics=["mae"], run_eagerly=True)
        if asks:
            report = kt.verify(model, X, Y, batch_size=8, steps=1)
            assert m.kinds(report) == [Kind.BATCH_NORM]
            assert not model.optimizer.built
            assert model.optimizer.iterations.numpy() == 0
            assert len(model.optimizer.variables) == 2
        model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def plain():
    return m.compiled(m.classifier())


@pytest.mark.parametrize(
    ("make", "data", "options", "message"),
    [
        (m.classifier, (X, Y), {}, "not compiled"),
        (lambda: len, (X, Y), {}, r"keras\.Model"),
        (plain, (), {}, "data"),
        (plain, (X[:1], Y[:1]), {}, "1 example"),
        *(
            (plain, (X, Y), {option: value}, option)
            for option in ("towers", "steps")
            for value in (0, 1.5, "2", True)
        ),
    ],
)
def test_refused(make, data, options, message):
    with pytest.raises(kt.TowerError, match=message):
        kt.verify(make(), *data, **options)


def test_refused_on_towers():
    model = plain()
    with kt.TowerStrategy(2), pytest.raises(kt.TowerError, match="before the"):
        kt.verify(model, X, Y)


def test_other_numbers_of_towers_and_nothing_is_printed(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = kt.verify(plain(), X[:15], Y[:15], towers=5, batch_size=8)
    assert report.batch_sizes == (8, 7)
    assert not capsys.readouterr().out
    assert repr(report) == f"<Report: {report.model}: proven>"


def test_parts_with_other_numbers_of_rows_are_named():
    data = tf.data.Dataset.from_tensors(({"a": X, "b": X[:5]}, Y))
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    pooled = keras.ops.mean(layers.Dense(3)(b), axis=0, keepdims=True)
    model = m.compiled(keras.Model([a, b], layers.Dense(3)(a) + pooled))
    report = kt.verify(model, data)
    assert m.kinds(report) == [Kind.ROWS]
    assert report.findings[0].name == "x['b']"
    assert "x['a']: 24, x['b']: 5, y: 24" in report.findings[0].message


@pytest.mark.parametrize(
    ("cls", "expected"),
    some_of([(m.SSE, [Kind.LOG]), (m.MSE, [Kind.GRADIENT])]),
)
def test_average_false(cls, expected):
    # Logs that are no metrics are averaged.
    report = kt.verify(m.own(cls), X, Y, average=False)
    assert m.kinds(report) == expected, str(report)


def test_half_precision():
    keras.config.set_dtype_policy("mixed_float16")
    model = plain()
    options = {"batch_size": 8, "steps": 1}
    assert kt.verify(model, X, Y, **options).safe
    assert model.layers[0].compute_dtype == "float16"
    report = kt.verify(m.own(m.Clipping), X, Y, **options)
    assert m.kinds(report) == [Kind.GRADIENT]
    assert report.findings[0].difference > 1e-2
