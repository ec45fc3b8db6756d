"""Python of a model runs as often as on one device, on the same shapes."""

import contextlib
import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.training import X, Y

BATCH = 8
CALLS = []


class Noted(keras.layers.Layer):
    """Notes when it is built and called, and when its function is traced."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def build(self, shape):
        CALLS.append(("build", tuple(shape)))
        self.dense.build(shape)

    @tf.function
    def halved(self, x):
        CALLS.append("a function of its own")
        return x / 2

    def call(self, x, training=False):
        CALLS.append(("call", tuple(x.shape), training))
        return self.halved(self.dense(x))


def loss(y, predicted):
    CALLS.append("loss")
    entropy = keras.losses.sparse_categorical_crossentropy
    return entropy(y, predicted, from_logits=True)


def metric(y, predicted):
    CALLS.append("metric")
    return keras.ops.mean(predicted, -1)


def lazy():
    return keras.Sequential([Noted(), keras.layers.Dense(3)])


def built():
    inputs = keras.Input((6,))
    return keras.Model(inputs, Noted()(inputs))


def never_built():
    model = built()
    model.unused = keras.layers.Dense(3)
    return model


def _scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


MODELS = {
    "lazy": (lazy, keras.optimizers.Adam, [metric, "accuracy"]),
    "built": (built, keras.optimizers.Adam, None),
    # Its step makes nothing.
    "nothing new": (never_built, keras.optimizers.SGD, None),
    "scaled": (never_built, _scaled, [metric]),
}


def _fit(model, count, **options):
    x, y = X[:count], Y[:count]
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, **options)


def fit_twice(model):
    _fit(model, 32, epochs=2)
    _fit(model, 32)


def fit_on_two_shapes(model):
    x = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20]))
    model.fit(x.batch(BATCH), epochs=2, verbose=0)
    _fit(model, 20)


def fit_and_validate(model):
    _fit(model, 32, validation_data=(X[:16], Y[:16]))
    model.evaluate(X[:16], Y[:16], batch_size=BATCH, verbose=0)
    model.predict(X[:16], batch_size=BATCH, verbose=0)


def fit_in_executions(model):
    model.steps_per_execution = 2
    _fit(model, 32)


def on_batches(model):
    for _ in range(3):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        model.test_on_batch(X[:BATCH], Y[:BATCH])
    model.predict_on_batch(X[:BATCH])


def evaluate(model):
    model.evaluate(X[:32], Y[:32], batch_size=BATCH, verbose=0)


def predict(model):
    model.predict(X[:32], batch_size=BATCH, verbose=0)


USES = (
    *(fit_twice, fit_on_two_shapes, fit_and_validate, fit_in_executions),
    *(on_batches, evaluate, predict),
)
STRATEGIES = {
    "one tower": functools.partial(kt.TowerStrategy, 1),
    "towers": functools.partial(kt.TowerStrategy, 2),
    "in shares": functools.partial(kt.TowerStrategy, 2, updates="sharded"),
}


def calls_of(name, use, block):
    make, optimizer, metrics = MODELS[name]
    CALLS.clear()
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizer(), loss, metrics=metrics, jit_compile=False)
    with block:
        use(model)
    return CALLS[:]


@functools.cache
def of_one_device(name, use):
    return calls_of(name, use, contextlib.nullcontext())


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_python_runs_as_often(name, use, small_shards):
    expected = of_one_device(name, use)
    found = {
        way: calls_of(name, use, make()) for way, make in STRATEGIES.items()
    }
    assert found == dict.fromkeys(STRATEGIES, expected)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(kt.TowerStrategy, 2, updates="each"),
        functools.partial(kt.TowerStrategy, 2, weights="sharded"),
        functools.partial(kt.ParameterServerTowerStrategy, 2),
    ],
)
def test_functions_are_traced_again_where_variables_move(make, small_shards):
    found = calls_of("lazy", fit_and_validate, make())
    expected = of_one_device("lazy", fit_and_validate)
    own = "a function of its own"
    assert [c for c in found if c != own] == [c for c in expected if c != own]
    assert found.count(own) <= expected.count(own) + 1


def test_a_step_that_always_makes_a_variable_is_refused():
    class Makes(keras.Model):
        def train_step(self, data):
            tf.Variable(1.0)
            return super().train_step(data)

    inputs = keras.Input((6,))
    model = Makes(inputs, keras.layers.Dense(3)(inputs))
    model.compile("sgd", loss)
    with (
        kt.TowerStrategy(2),
        pytest.raises(kt.TowerError, match="makes a variable each time"),
    ):
        _fit(model, 8)


def test_a_first_value_that_depends_on_the_batch_is_refused():
    class Scales(keras.layers.Layer):
        scale = None

        def call(self, x):
            if self.scale is None:
                self.scale = tf.Variable(tf.reduce_mean(x), name="of_first")
            return x * self.scale

    model = keras.Sequential([Scales(), keras.layers.Dense(3)])
    model.compile("sgd", loss)
    with (
        kt.TowerStrategy(2),
        pytest.raises(kt.TowerError, match=r"batch \(of_first:0.*zeros"),
    ):
        _fit(model, 8)
