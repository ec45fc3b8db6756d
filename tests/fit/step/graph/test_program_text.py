"""Which steps ranks tell apart by their texts, and which they do not."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.data.same_data import is_far
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.step.graph.program_text import text_of
from keras_towers.fit.step.graph.trace import trace

pytestmark = pytest.mark.core
D = keras.layers
SPEC = tf.TensorSpec([None, 4, 2]), tf.TensorSpec([None])


def step_of(model, kind="fit"):
    """What ranks compare of a step of a model."""
    build = model.optimizer.build if model.optimizer else None
    step = model.train_step if kind == "fit" else model.predict_step
    spec = SPEC if kind == "fit" else SPEC[:1]

    @tf.function
    def outer():
        ready = lambda o, weights: None if o.built else build(weights)  # noqa: E731
        found.append(trace(step, spec, kind, ready))

    found = []
    outer.get_concrete_function()
    return text_of(found[-1], model)


def differ(one, other):
    """Whether ranks with these texts refuse to go on."""
    if ComparedStep(one).numbers == ComparedStep(other).numbers:
        return False
    if one.checksum != other.checksum:
        return True
    values, slack = one.reals_and_slack()
    return bool(is_far(values, other.reals_and_slack()[0], slack))


def firsts(one, other):
    """The first lines that differ."""
    pairs = itertools.zip_longest(one.checksums, other.checksums)
    index = next(k for k, (a, b) in enumerate(pairs) if a != b)
    assert one.first(index) == other.first(index)
    assert one.first(index + 1) != other.first(index + 1)
    return one.line(index), other.line(index)


def made(*layers, number=0, loss="mse", **options):
    """A model of one output, after others that have taken the first names."""
    for _ in range(number):
        D.Dense(1)(keras.Input((2,)))
    keras.utils.set_random_seed(number)
    layers = [keras.Input((4, 2)), *layers, D.Flatten(), D.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model


class Tanh(keras.Model):
    """Whose configuration says nothing of what it does."""

    def __init__(self, act, swaps=False, **options):
        super().__init__()
        self.act, self.swaps = act, swaps
        self.one, self.other = D.Dense(2), D.Dense(2)
        self.flatten, self.last = D.Flatten(), D.Dense(1)
        self.compile("sgd", "mse")

    def call(self, x):
        layers = [self.one, self.other]
        for layer in reversed(layers) if self.swaps else layers:
            x = self.act(layer(x))
        return self.last(self.flatten(x))


def connected(of):
    inputs = keras.Input((4, 2))
    shared = D.Dense(2)
    hidden = shared(inputs)
    out = shared(hidden) + 2.0 * [inputs, hidden][of][:, :1]
    model = keras.Model(inputs, D.Dense(1)(D.Flatten()(out)))
    model.compile("sgd", "mse")
    return model


def scanned(factor=2.0, reverse=False):
    """A loop and a branch, with functions of their own."""

    class Scan(D.Layer):
        def call(self, x):
            def body(k, total):
                return k + 1, total + tf.cast(k, "float32") * x[:, k]

            def loop():
                cond = lambda k, total: k < 4  # noqa: E731
                zeros = tf.zeros_like(x[:, 0])
                _, total = tf.while_loop(cond, body, (0, zeros))
                return total if reverse else total * factor

            return tf.cond(tf.reduce_sum(x) > 0, loop, lambda: x[:, 0] + 1)

    return made(Scan(), D.Reshape((2, 1)))


def imported(x):
    """Operations that Python has not made one by one have no line."""
    with tf.Graph().as_default() as graph:
        tf.nn.relu(tf.compat.v1.placeholder(tf.float32, name="x"), name="y")
    definition, taken = graph.as_graph_def(), {"x": x}
    (result,) = tf.graph_util.import_graph_def(definition, taken, ["y:0"])
    return tf.ensure_shape(result, x.shape)


ALIKE = {
    "names and seeds": lambda k: made(D.Dense(2, "relu"), number=3 * k),
    "own names": lambda k: made(D.Dense(2, name=f"mine_{k}")),
    "rates of dropout": lambda k: made(D.Dropout(0.5, seed=k)),
    "first values": lambda k: made(
        D.Dense(2, kernel_initializer=["zeros", "ones"][k])
    ),
    "lambdas": lambda k: made(D.Lambda(lambda x: x * 2)),
    "a learning rate": lambda k: made_with_rate([0.1, 0.2][k]),
    "functions": lambda k: scanned(),
    "what is imported": lambda k: made(D.Lambda(imported)),
}
UNLIKE = {
    "activation": (
        lambda k: made(D.Dense(2, ["relu", "tanh"][k])),
        "Relu float32 (None, 4, 2)",
        "Tanh",
    ),
    "momentum": (
        lambda k: made(D.BatchNormalization(momentum=0.5 + k / 4)),
        "constant ",
        "constant ",
    ),
    "rates in another order": (
        lambda k: made(
            D.Dropout([0.25, 0.5][k]), D.Dense(2), D.Dropout([0.5, 0.25][k])
        ),
        "constant ",
        "constant ",
    ),
    "dtype": (
        lambda k: made(D.Dense(2, dtype=["float32", "bfloat16"][k])),
        "",
        "Cast bfloat16",
    ),
    "strides": (
        lambda k: made(D.Conv1D(2, 1, strides=1 + k, padding="same")),
        "Conv2D",
        "Conv2D",
    ),
    "loss": (lambda k: made(loss=["mse", "mae"][k]), "Square", "Abs"),
    "metrics": (lambda k: made(metrics=[["mae"], ["mape"]][k]), "", ""),
    "one more layer": (
        lambda k: made(*[D.ReLU() for _ in range(k)]),
        "",
        "Relu",
    ),
    "attribute of a subclassed model": (
        lambda k: Tanh([tf.nn.relu, tf.nn.tanh][k]),
        "Relu",
        "Tanh",
    ),
    "weights of equal shapes": (
        lambda k: Tanh(tf.nn.relu, swaps=bool(k)),
        "",
        "",
    ),
    "connections": (connected, "", ""),
    "a constant in a branch": (
        lambda k: scanned(2.0 + k),
        "constant ",
        "constant ",
    ),
    "an operation in a branch": (
        lambda k: scanned(reverse=bool(k)),
        "constant ",
        "",
    ),
    # Ranks exchange in this order.
    "order in which a dict is made": (
        lambda k: in_order(["ab", "ba"][k]),
        "",
        "",
    ),
    "what is trained": (lambda k: frozen(bool(k)), "", ""),
}


def made_with_rate(rate):
    model = made()
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def in_order(names):
    inputs = keras.Input((4, 2))
    flat = D.Flatten()(inputs)
    heads = {name: D.Dense(1, name=name) for name in "ab"}
    model = keras.Model(inputs, {name: heads[name](flat) for name in "ab"})
    model.compile("sgd", dict.fromkeys(names, "mse"))
    model.train_step = lambda data: keras.Model.train_step(
        model, (data[0], dict.fromkeys(names, data[1]))
    )
    return model


def frozen(is_frozen):
    model = made(D.Dense(2))
    model.layers[0].trainable = not is_frozen
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("what", ALIKE)
def test_what_changes_no_result_may_differ(what):
    one, other = (step_of(ALIKE[what](k)) for k in range(2))
    assert one.checksum == other.checksum
    assert one.checksums == other.checksums


@pytest.mark.parametrize("what", UNLIKE)
def test_other_steps_are_told_apart(what):
    """By the first line that differs."""
    make, *shown = UNLIKE[what]
    one, other = (step_of(make(k)) for k in range(2))
    assert differ(one, other)
    for first, text in zip(firsts(one, other), shown, strict=True):
        assert first.result.startswith(text)


def test_an_operation_is_shown_with_the_line_of_the_user():
    one, other = (
        step_of(made(D.Lambda(act)))
        for act in (lambda x: x * 2.0, lambda x: tf.nn.tanh(x) * 2.0)
    )
    _, first = firsts(one, other)
    assert str(first).startswith("Tanh float32 (None, 4, 2) of test_program_t")
    assert "lambda x: tf.nn.tanh(x)" in first.code


def test_attributes_are_shown():
    one, other = (step_of(UNLIKE["strides"][0](k)) for k in range(2))
    first, _ = firsts(one, other)
    assert "i: 1" in first.attributes["strides"]


def trace_of(step, spec=None):
    """The trace of a step that takes a number."""

    @tf.function
    def outer():
        given = tf.TensorSpec([]) if spec is None else spec
        found.append(trace(step, given, "evaluate", None))

    found = []
    outer.get_concrete_function()
    return found[0]


def text(*given):
    return text_of(trace_of(*given), keras.Sequential())


def test_what_is_not_needed_does_not_count_but_the_order_does():
    def traced(swaps, prints):
        def step(x):
            parts = [lambda: tf.sin(x), lambda: tf.cos(x)]
            if prints:
                tf.print(tf.exp(x))
            found = {k: parts[k]() for k in ((1, 0) if swaps else (0, 1))}
            return found[0] - found[1]

        return text(step, tf.TensorSpec([3]))

    one, prints, other = (
        traced(*options) for options in ((0, 0), (0, 1), (1, 0))
    )
    assert one.checksum == prints.checksum != other.checksum
    _, first = firsts(one, other)
    assert first.result.startswith("Cos")


MANY = np.random.default_rng(0).normal(size=(40, 30))
FEW_OTHERS = MANY + (np.arange(1200).reshape(40, 30) % 200 == 7) * 1e-6
WORDS = ["red", "green", "blue"] * 60


def using(constant):
    """A step with a constant that Python has computed."""

    def number(x):
        value = tf.convert_to_tensor(constant)
        if value.dtype == tf.string:
            value = tf.strings.to_hash_bucket_fast(value, 99)
        return x + tf.reduce_sum(tf.cast(value, tf.float32))

    return text(lambda x: tf.cond(x > 0, lambda: number(x), lambda: x * 0.5))


@pytest.mark.parametrize(
    "one, other",
    [
        (np.float32(0.3), np.nextafter(np.float32(0.3), np.float32(1))),
        (MANY, MANY * (1 + 1e-15)),
        (tf.constant(MANY), tf.constant(MANY * (1 + 1e-15))),
        (1j * MANY[0], 1j * MANY[0] * (1 + 1e-15)),
        (np.float64(np.nan), -np.float64(np.nan)),
        (
            tf.constant([0.3, 1], "bfloat16"),
            tf.constant([0.301, 1], "bfloat16"),
        ),
    ],
    ids=["number", "array", "captured", "complex", "nan", "bfloat16"],
)
def test_rounding_is_no_difference(one, other):
    assert not differ(using(one), using(other))


@pytest.mark.parametrize(
    "one, other",
    [
        (0.3, 0.300001),
        (1e-6, 2e-6),
        (0.0, 1e-30),
        (np.float64(1e300), np.float64(np.inf)),
        (np.nan, 0.0),
        (np.float64(1.7e9), np.float64(1.7e9 + 3)),
        (True, False),
        (MANY, MANY[::-1].copy()),
        (MANY, FEW_OTHERS),
        (tf.constant(MANY), tf.constant(FEW_OTHERS)),
        (tf.range(999), tf.range(999)[::-1]),
        (WORDS, WORDS[::-1]),
        (tf.constant(WORDS), tf.constant(WORDS[::-1])),
        (tf.constant(b"a"), tf.constant(b"a\0")),
    ],
    ids=[
        *("number", "small", "zero", "infinite", "nan", "large"),
        *("truth", "order", "a-few", "captured"),
        *("captured-integers", "words", "captured-words", "end"),
    ],
)
def test_other_constants_differ(one, other):
    one, other = (using(value) for value in (one, other))
    assert differ(one, other)
    for line in firsts(one, other):
        assert line.result.startswith("constant ")
        assert line.code.startswith("test_program_text.py:")


TABLES = [
    tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], [k, 5]), -1
    )
    for k in range(2)
]
COMMUTING = {
    "factors": lambda x, k: x * [2.0, 3.0][k],
    "slices": lambda x, k: x[:, k : k + 1],
    "gathers": lambda x, k: tf.gather(x, k, axis=1),
    "thresholds": lambda x, k: tf.where(x > [1.5, 2.5][k], x, 0.0),
    "others": lambda x, k: tf.where(x > 2.0, x, float(k)),
    "words": lambda x, k: x * tf.cast(tf.strings.length("a" * k), x.dtype),
    "tables": lambda x, k: (
        x * tf.cast(TABLES[k].lookup(tf.constant("a")), x.dtype)
    ),
    "functions": lambda x, k: tf.cond(
        x[0, 0] > 0, lambda: [tf.sin, tf.cos][k](x), lambda: x
    ),
}


@pytest.mark.parametrize("what", COMMUTING)
def test_what_commutes_is_another_step(what):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    one, other = (
        text(
            lambda n, order=order: sum(COMMUTING[what](x * n, k) for k in order)
        )
        for order in ((0, 1), (1, 0))
    )
    assert differ(one, other)
    first, second = firsts(one, other)
    assert str(first) != str(second)


def test_exchanges_come_after_operations():
    found, model = trace_of(lambda x: x + 1), keras.Sequential()
    one = text_of(found, model, ["sum a_1", "sum b"])
    assert one.checksums == text_of(found, model, ["sum a", "sum b"]).checksums
    first, second = firsts(one, text_of(found, model, ["sum b", "sum a"]))
    assert (str(first), str(second)) == ("sum a_1", "sum b")


NUMBER = tf.Variable(7, dtype=tf.int64)
SCALE = tf.Variable(2.0)


def with_summary(x):
    tf.summary.scalar("rate", 0.125, NUMBER)
    return tf.math.log(x * 0.3) * SCALE


@pytest.mark.parametrize("wrapped", [lambda step: step, tf.function])
@pytest.mark.parametrize("written", [False, True])
def test_what_only_a_summary_shows_may_differ(tmp_path, wrapped, written):
    def step(x):
        if written:
            NUMBER.assign_add(1)
        return wrapped(with_summary)(x)

    without = trace_of(step)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        shown = trace_of(step)
    assert len(shown.captures) > len(without.captures)
    one, other = (
        text_of(found, keras.Sequential()) for found in (shown, without)
    )
    assert one.checksums == other.checksums
    used = {id(SCALE.handle), *([id(NUMBER.handle)] if written else ())}
    for found in shown, without:
        outside = found.variables_outside(keras.Sequential())
        assert {id(handle) for handle in outside} == used
