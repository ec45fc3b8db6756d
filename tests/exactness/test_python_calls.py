"""Python of a model runs as often as on one device, on the same shapes."""

import contextlib
import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.training import X, Y

pytestmark = pytest.mark.alternate

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


USES = (
    *(fit_twice, fit_on_two_shapes, fit_and_validate, fit_in_executions),
    on_batches,
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


class OwnFunction(keras.Model):
    """Trains by a function of its own."""

    def __init__(self):
        super().__init__()
        self.noted = Noted()

    def call(self, x):
        return self.noted(x)

    def make_train_function(self, force=False):
        step = tf.function(self.train_step)
        self.train_function = lambda iterator: step(next(iterator))
        return self.train_function


def own_train_function():
    model = OwnFunction()
    model.compile("sgd", loss)
    _fit(model, 32)


def own_loop():
    model, optimizer = lazy(), keras.optimizers.SGD(0.1, momentum=0.5)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(loss(y, model(x)))
        gradients = tape.gradient(mean, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    for k in range(3):
        step(X[k * BATCH :][:BATCH], Y[k * BATCH :][:BATCH])


@pytest.mark.parametrize("train", [own_train_function, own_loop])
def test_functions_of_ones_own_are_traced_as_often(train):
    found = {}
    for name, make in {"": contextlib.nullcontext, **STRATEGIES}.items():
        CALLS.clear()
        with make():
            train()
        found[name] = CALLS[:]
    assert found == dict.fromkeys(found, found[""])


class LazySlots(keras.optimizers.SGD):
    """Makes a variable in the first update of each weight."""

    slots = None

    def update_step(self, gradient, variable, learning_rate):
        if self.slots is None:
            self.__dict__["slots"] = {}
        # Shapes differ.
        shape = tuple(variable.shape)
        if shape not in self.slots:
            self.slots[shape] = tf.Variable(tf.zeros(shape))
        slot = self.slots[shape]
        slot.assign(0.9 * slot + gradient)
        super().update_step(slot, variable, learning_rate)


class FirstValues(keras.Model):
    """Makes variables whose first values depend on others."""

    scale = None

    def train_step(self, data):
        if self.scale is None:
            self.half = tf.Variable(0.5)
            kernel = self.layers[-1].kernel
            self.sum = tf.Variable(lambda: tf.reduce_sum(kernel))
            self.scale = tf.Variable(self.half * self.sum)
        x, y = data
        return super().train_step((x * self.scale, y))


def test_what_a_step_makes_begins_as_on_one_device():
    found = []
    for make in (contextlib.nullcontext, *STRATEGIES.values()):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = FirstValues(inputs, keras.layers.Dense(3)(inputs))
        model.compile(LazySlots(0.1), loss)
        with make():
            _fit(model, 20, epochs=2)
        found.append(tf.concat([tf.reshape(w, -1) for w in model.weights], 0))
    for weights in found[1:]:
        tf.debugging.assert_near(weights, found[0], 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("first_value", "cause"),
    [
        (lambda x, _: tf.reduce_mean(x), "the batch"),
        (lambda _, count: count.assign_add(1.0) * 2, "what the step has writ"),
    ],
)
def test_a_first_value_that_only_a_step_knows_is_refused(first_value, cause):
    class Scales(keras.layers.Layer):
        scale = None

        def build(self, shape):
            self.count = tf.Variable(1.0)

        def call(self, x):
            if self.scale is None:
                value = first_value(x, self.count)
                self.scale = tf.Variable(value, name="of_first")
            return x * self.scale

    model = keras.Sequential([Scales(), keras.layers.Dense(3)])
    model.layers[0].build((None, 6))
    model.compile("sgd", loss)
    with (
        kt.TowerStrategy(2),
        pytest.raises(kt.TowerError, match=rf"of_first:0\) depends on {cause}"),
    ):
        _fit(model, 8)


class UpdatesNoMetric(keras.Model):
    """Its step uses nothing of ``compile`` but the optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(loss(y, self(x, training=True)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(mean, weights), weights)
        return {"mine": mean}


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        contextlib.nullcontext,
        STRATEGIES["towers"],
        functools.partial(kt.AsyncTowerStrategy, 2),
        functools.partial(kt.SyncReplicasStrategy, towers=2),
        functools.partial(kt.ParameterServerTowerStrategy, 2),
    ],
)
def test_a_metric_that_no_step_updates_is_never_built(make, compiles):
    """As on one device: what makes variables before a step is a step."""
    inputs = keras.Input((6,))
    model = UpdatesNoMetric(inputs, keras.layers.Dense(3)(inputs))
    for metrics in (None, ["accuracy"]):
        model.compile("sgd", loss, metrics=metrics, jit_compile=compiles)
        said = metrics and pytest.raises(ValueError, match="not yet been built")
        with make(), said or contextlib.nullcontext():
            _fit(model, 16)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(BATCH * index, BATCH * (index + 1))
        return X[rows], Y[rows]


class NeverBuilt(keras.Model):
    """Its step calls a built layer, not the model."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, 6))

    def train_step(self, data):
        CALLS.append("step")
        x, y = data
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(loss(y, self.dense(x)))
        weights = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(mean, weights), weights)
        return {"loss": mean}


def test_what_is_made_before_data_are_read_is_made_once():
    found = []
    for make in (contextlib.nullcontext, *STRATEGIES.values()):
        CALLS.clear()
        for model in (NeverBuilt(), lazy()):
            model.compile("sgd", loss, jit_compile=False)
            with make():
                for _ in range(2):
                    model.fit(Batches(), verbose=0, shuffle=False)
        found.append(CALLS[:])
    assert found[1:] == [found[0]] * len(STRATEGIES)
