"""What ``fit`` warns of with ``exact=True``, or refuses, is never safe."""

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_towers as kt
from keras_towers.fit import contract, told
from keras_towers.verification import Kind
from tests.kit.long import some_of
from tests.verification import models as m

X, Y = m.FEATURES, m.TARGETS
SEED = [7, 42]
ABOUT_SPEED = ("jit_compile is off",)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    """Nothing has been said in this process."""
    monkeypatch.setattr(told, "_said", set())


@pytest.fixture
def warned(caplog):
    """What training on towers warns of."""

    def of(model, *data):
        caplog.clear()
        options = {} if len(data) == 1 else {"batch_size": 8}
        with kt.TowerStrategy(2, exact=True):
            model.fit(*data, verbose=0, **options)
        # TensorFlow's own are of how often a process has traced.
        messages = [
            record.getMessage()
            for record in caplog.records
            if record.name == "keras_towers"
        ]
        return [x for x in messages if not x.startswith(ABOUT_SPEED)]

    return of


def verified(model, *data):
    return kt.verify(model, *data, batch_size=8, steps=1, exact=True)


def dropped(x):
    return tf.nn.experimental.stateless_dropout(x, 0.4, SEED)


class Drawing(m.MSE):
    """Draws, without any use, so that only its graph tells what is drawn."""

    def __init__(self, *draws):
        super().__init__()
        self.draws = draws
        self.generator = tf.random.Generator.from_seed(4)
        self.function = tf.function(dropped)

    def loss_of(self, data):
        drawn = [tf.reduce_mean(draw(self, data[0])) for draw in self.draws]
        return super().loss_of(data) + 0.0 * tf.add_n(drawn)


def masked(model, x):
    return dropped(tf.boolean_mask(x[:, :1], x[:, 0] > 0))


def half(model, x):
    return dropped(x[: (tf.shape(x)[0] + 1) // 2, :2])


def in_a_function(model, x):
    return model.function(x[:, :3])


# A finding for each of them: no two are alike.
UNKNOWN_ROWS = (
    masked,
    half,
    lambda _, x: tf.map_fn(
        lambda row: row + tf.random.stateless_normal([6], SEED), x
    ),
    in_a_function,
)
# These differ, whatever draws them.
OTHERS = (
    lambda _, x: tf.random.normal(tf.shape(x)),
    lambda _, x: tf.nn.dropout(x, 0.4),
    lambda model, x: model.generator.normal(tf.shape(x)),
)


class Writing(m.MSE):
    """Writes something to variables of its own.

    Args:
        **values: takes the features, by the kind of the variable.
    """

    def __init__(self, *values):
        super().__init__()
        self.values = values
        for index, (plain, _) in enumerate(values):
            variable = tf.Variable(0.0, False) if plain else self.scalar()
            setattr(self, f"kept_{index}", variable)

    def train_step(self, data):
        for index, (_, value) in enumerate(self.values):
            kept = getattr(self, f"kept_{index}")
            kept.assign(0.9 * kept + value(data[0]))
        return super().train_step(data)


class Reporting(Writing):
    """Reports no means, too."""

    def train_step(self, data):
        x = data[0]
        more = {"rows": ops.shape(x)[0], "three": tf.constant(3)}
        return {**super().train_step(data), **more, "vector": x[0] * 0.0}


WARNED = {
    "rows": (
        lambda: (m.own(Drawing, *UNKNOWN_ROWS, jit_compile=True), X, Y),
        [Kind.RANDOM] * len(UNKNOWN_ROWS),
    ),
    "other draws": (
        lambda: (m.own(Drawing, *OTHERS), X, Y),
        [Kind.EFFECT, Kind.LOG] + [Kind.RANDOM] * len(OTHERS),
    ),
    "eager": (
        lambda: (
            m.compiled(m.classifier(layers.Dropout(0.3)), run_eagerly=True),
            *(X, Y),
        ),
        [Kind.RANDOM],
    ),
    "written and logged": (
        lambda: (
            m.own(
                Reporting,
                *((False, ops.max), (False, ops.mean)),
                *((True, lambda x: 3.0), (True, tf.reduce_mean)),
            ),
            *(X, Y),
        ),
        # By the analysis a mean is right, and a constant.
        [Kind.LOG] * 2 + [Kind.STATE] * 3,
    ),
}


@pytest.mark.parametrize("name", some_of(WARNED))
def test_what_fit_warns_of_is_not_safe(name, warned):
    make, expected = WARNED[name]
    model, *data = make()
    report = verified(model, *data)
    assert m.kinds(report) == sorted(expected), str(report)
    assert warned(model, *data)
    if name == "other draws":
        assert "keras.random" in str(report.remedies)


class InConditional(m.MSE):
    """Updates weights where no tower can wait for another."""

    def train_step(self, data):
        train = super().train_step
        return tf.cond(
            tf.reduce_sum(data[0]) > -1e9,
            lambda: train(data),
            lambda: {"loss": 0.0},
        )


class AsksForValues(m.MSE):
    """Looks at values, which a graph does not have."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "more": float(ops.mean(data[0]))}


@pytest.mark.parametrize("cls", some_of([InConditional, AsksForValues]))
def test_what_fit_refuses_is_not_safe(cls):
    model = m.own(cls)
    report = verified(model, X, Y)
    assert m.kinds(report) == [Kind.FAILS], str(report)
    with pytest.raises(Exception) as raised, kt.TowerStrategy(2, exact=True):
        model.fit(X, Y, verbose=0)
    assert "in the graph" in report.findings[0].message
    assert str(raised.value)


class Matched(Writing):
    """Mixes images and labels, drops, and writes a mean of all towers."""

    def __init__(self):
        super().__init__((False, kt.mean))
        self.mix = layers.MixUp(seed=3)

    def train_step(self, data):
        images = ops.reshape(data[0], (-1, 2, 3, 1))
        mixed = self.mix({"images": images, "labels": data[1]}, training=True)
        x = ops.reshape(mixed["images"], (-1, 6))
        x = keras.random.dropout(x, 0.3, seed=2)
        return super().train_step((x, mixed["labels"]))


def test_what_fit_is_silent_about_stays_safe(warned):
    model = m.own(Matched, jit_compile=True)
    report = verified(model, X, Y)
    assert report.safe, str(report)
    assert not warned(model, X, Y)


def test_what_fit_tells_is_listed_and_not_told():
    model = m.own(Drawing, half, in_a_function)
    report = verified(model, X, Y)
    assert all("fit says" in f.message for f in report.findings)
    assert "loop" in report.remedies[0]
    assert contract.home_of(model) is None
    assert model.function.experimental_get_tracing_count() == 0
    assert not told._said
