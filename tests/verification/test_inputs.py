"""What verify takes, refuses and leaves behind."""

import contextlib
import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers import compat
from keras_towers.fit.verify import draws
from keras_towers.fit.weights import state as state_lib
from keras_towers.verification import Kind
from tests.kit.long import long_but
from tests.verification import coupled as c
from tests.verification import models as m

X, Y = m.FEATURES, m.TARGETS


def values(model):
    return [v.numpy() for v in state_lib.collect(model).everything()]


def normal():
    """A trained model with every kind of state."""
    keras.utils.set_random_seed(1)
    model = m.compiled(
        m.classifier(layers.BatchNormalization(), layers.Dropout(0.3)),
        optimizer=keras.optimizers.Adam(0.01, use_ema=True),
        metrics=["mae"],
    )
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def test_state_is_restored_bit_for_bit():
    model = normal()
    before, attributes = values(model), dict(vars(model))
    function = model.train_function
    random.seed(3), np.random.seed(3), tf.random.set_seed(3)
    drawn = random.random(), np.random.rand(), tf.random.normal(()).numpy()
    random.seed(3), np.random.seed(3), tf.random.set_seed(3)
    assert not kt.verify(model, X, Y, batch_size=8).safe
    again = random.random(), np.random.rand(), tf.random.normal(()).numpy()
    assert again == drawn
    after = values(model)
    assert len(after) == len(before)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert vars(model) == attributes
    assert model.train_function is function


def test_training_goes_on_as_if_nothing_had_happened():
    asked, not_asked = normal(), normal()
    kt.verify(asked, X, Y, batch_size=8)
    for model in (asked, not_asked):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    # Two traces may add the same numbers in another order; whole numbers, such
    # as the states of random layers, have to be equal.
    for a, b in zip(values(asked), values(not_asked), strict=True):
        near = 1e-6 if np.issubdtype(a.dtype, np.floating) else 0
        np.testing.assert_allclose(a, b, rtol=near, atol=near)


def test_a_new_model_trains_as_if_nothing_had_happened():
    weights = []
    for asks in (True, False):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.build((None, 6))
        if asks:
            assert kt.verify(model, X, Y).safe
            assert not model.optimizer.built
            assert model.optimizer.iterations.numpy() == 0
            assert len(model.optimizer.variables) == 2
        model.layers[0].trainable = False
        model.compile(model.optimizer, "mse")
        model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


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


def test_attributes_and_plain_variables_are_restored():
    model = m.compiled(Counting(), None)
    model(X[:1])
    report = kt.verify(model, X, Y)
    assert [f.name for f in report.findings] == [f"{model.name}.plain"]
    assert model.steps == 0
    assert model.seen == {"rows": []}
    assert model.plain.numpy() == 1.0


def replaced_names():
    return [
        getattr(owner, name)
        for owner, name in (*draws._DRAWING, *draws._DROPPING)
    ] + [
        tf.GradientTape.gradient,
        compat.Function.__call__,
        compat.KerasVariable._initialize,
        keras.Model.fit,
        tf.config.functions_run_eagerly(),
        tf.get_logger().level,
    ]


@pytest.mark.parametrize("cls", [m.VAE, c.SimCLR, c.Reads])
def test_nothing_stays_replaced(cls):
    before = replaced_names()
    with contextlib.suppress(kt.TowerError):
        kt.verify(m.compiled(cls(), None), X, batch_size=8)
    assert all(a is b for a, b in zip(before, replaced_names(), strict=True))


def test_state_is_restored_after_an_error():
    model = m.compiled(c.Reads(), None)
    model(X[:1])
    before = values(model)
    with pytest.raises(kt.TowerError, match="fails on one device"):
        kt.verify(model, X, Y)
    for a, b in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not tf.config.functions_run_eagerly()


def test_parts_with_other_numbers_of_rows_are_named():
    data = tf.data.Dataset.from_tensors(({"a": X, "b": X[:5]}, Y))
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    pooled = keras.ops.mean(layers.Dense(3)(b), axis=0, keepdims=True)
    model = m.compiled(keras.Model([a, b], layers.Dense(3)(a) + pooled))
    report = kt.verify(model, data)
    assert [f.kind for f in report.findings] == [Kind.ROWS]
    assert report.findings[0].name == "x['b']"
    assert "x['a']: 24, x['b']: 5, y: 24" in report.findings[0].message


def test_parts_that_are_split_by_their_own_rows():
    class Twice(m.MSE):
        def loss_of(self, data):
            x, y = data
            unlabelled = keras.ops.mean(self.body(x["b"]) ** 2)
            return unlabelled + super().loss_of((x["a"], y))

    data = tf.data.Dataset.from_tensors(({"a": X[:8], "b": X[:12]}, Y[:8]))
    report = kt.verify(m.compiled(Twice(), None), data)
    # The loss is right, if every row is an example: nothing tells.
    assert [f.kind for f in report.findings] == [Kind.ROWS]


def test_uncompiled():
    with pytest.raises(kt.TowerError, match="not compiled"):
        kt.verify(m.classifier(), X, Y)


def test_no_model():
    with pytest.raises(kt.TowerError, match=r"keras\.Model"):
        kt.verify(lambda x: x, X, Y)


def test_no_data():
    with pytest.raises(kt.TowerError, match="data"):
        kt.verify(m.compiled(m.classifier()))


def test_too_few_rows():
    with pytest.raises(kt.TowerError, match="1 example"):
        kt.verify(m.compiled(m.classifier()), X[:1], Y[:1])


@pytest.mark.parametrize("option", ["towers", "batches"])
@pytest.mark.parametrize("value", [0, 1.5, "2", True])
def test_bad_numbers(option, value):
    with pytest.raises(kt.TowerError, match=option):
        kt.verify(m.compiled(m.classifier()), X, Y, **{option: value})


def test_in_a_scope():
    model = m.compiled(m.classifier())
    with (
        kt.TowerStrategy(2),
        pytest.raises(kt.TowerError, match="before the"),
    ):
        kt.verify(model, X, Y)


def test_uneven_batches_and_other_numbers_of_towers():
    model = m.compiled(m.classifier())
    for towers in (2, 3, 5):
        report = kt.verify(model, X[:7], Y[:7], towers=towers)
        assert report.safe, str(report)
        assert any(rows % towers for rows in report.batches)


def test_average_false():
    report = kt.verify(m.compiled(c.SSE(), None), X, Y, average=False)
    # Logs that are no metrics are averaged.
    assert [f.kind for f in report.findings] == [Kind.LOG]
    report = kt.verify(m.compiled(m.MSE(), None), X, Y, average=False)
    assert [f.kind for f in report.findings] == [Kind.MEAN]


# Unusual models.


def test_dictionaries_and_several_outputs():
    keras.utils.set_random_seed(4)
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    both = layers.Concatenate()([layers.Dense(4, "tanh")(a), b])
    outputs = {
        "p": layers.Dense(3, name="p")(both),
        "q": layers.Dense(1, name="q")(both),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("adam", {"p": "mse", "q": "mae"}, metrics={"p": ["mae"]})
    targets = {"p": Y, "q": Y[:, :1]}
    report = kt.verify(model, {"a": X, "b": X}, targets, batch_size=8)
    assert report.safe, str(report)


@pytest.mark.parametrize(
    "policy",
    long_but("mixed_float16".__eq__, ["mixed_float16", "mixed_bfloat16"]),
)
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    model = m.compiled(m.classifier())
    assert kt.verify(model, X, Y, batch_size=8).safe
    assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    report = kt.verify(m.compiled(c.Clipping(), None), X, Y, batch_size=8)
    assert [f.kind for f in report.findings] == [Kind.CHANGED_BY_HAND]


@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"jit_compile": True}]
)
def test_ways_to_run(options):
    model = m.compiled(m.classifier(), **options)
    assert kt.verify(model, X, Y, batch_size=8).safe
    model = c.SimCLR()
    model.compile("adam", **options)
    assert not kt.verify(model, X, batch_size=8).safe


def test_steps_that_are_functions():
    model = m.compiled(c.Clipping(), None)
    model.train_step = tf.function(model.train_step)
    report = kt.verify(model, X, Y, batch_size=8)
    assert [f.kind for f in report.findings] == [Kind.CHANGED_BY_HAND]


def test_strings():
    words = np.array(["a", "b", "c", "d"])[np.arange(m.ROWS) % 4]
    lookup = layers.StringLookup(vocabulary=["a", "b", "c", "d"])

    class Words(m.Stepping):
        def loss_of(self, data):
            x = keras.ops.one_hot(lookup(data[0]), 6)
            return keras.ops.mean((self.body(x) - data[1]) ** 2)

    data = tf.data.Dataset.from_tensor_slices((words, Y[:, :1])).batch(8)
    report = kt.verify(m.compiled(Words(8, 1), None), data)
    assert report.safe, str(report)


def test_ragged_rows():
    class Ragged(m.Stepping):
        def loss_of(self, data):
            sums = tf.reduce_sum(data[0], axis=1)[:, None]
            return keras.ops.mean((self.body(sums) - data[1]) ** 2)

    rows = tf.ragged.constant([[1.0] * (1 + k % 5) for k in range(m.ROWS)])
    data = tf.data.Dataset.from_tensor_slices((rows, Y[:, :1])).batch(7)
    report = kt.verify(m.compiled(Ragged(8, 1), None), data)
    assert report.safe, str(report)


def test_generators():
    def batches():
        for start in range(0, m.ROWS, 8):
            yield X[start : start + 8], Y[start : start + 8]

    assert kt.verify(m.compiled(m.classifier()), batches()).safe


class Lazy(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)]
        )

    def call(self, x, training=None):
        return self.inner(x, training=training)


def test_a_model_that_builds_at_its_first_batch():
    weights = []
    for asks in (True, False):
        keras.utils.set_random_seed(5)
        model = m.compiled(Lazy(), metrics=["mae"])
        if asks:
            report = kt.verify(model, X, Y, batch_size=8)
            assert [f.kind for f in report.findings] == [Kind.BATCH_NORM]
        model.fit(X, Y, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_nothing_is_printed(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = kt.verify(m.compiled(m.classifier()), X, Y, batch_size=8)
    said = capsys.readouterr()
    assert not said.out
    assert repr(report) == f"<Report: {report.model} is safe>"
