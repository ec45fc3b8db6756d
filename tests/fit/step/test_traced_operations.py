"""Which steps ranks tell apart by their operations, and which they do not."""

import keras
import pytest
import tensorflow as tf

from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.step.trace import trace
from keras_towers.fit.step.traced_constants import constants_of
from keras_towers.fit.step.traced_operations import TracedOperations

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
    operations = TracedOperations(found[-1], model)
    constants = constants_of(found[-1], operations)
    return ComparedStep((), operations.described, constants)


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


def connected(of=0, index=0):
    inputs = keras.Input((4, 2))
    shared = D.Dense(2)
    hidden = shared(inputs)
    out = shared(hidden) + 2.0 * [inputs, hidden][of][:, index, None]
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
    "lambda": (
        lambda k: made(D.Lambda([lambda x: x * 2, lambda x: -x][k])),
        "Mul",
        "Neg",
    ),
    "momentum": (
        lambda k: made(D.BatchNormalization(momentum=0.5 + k / 4)),
        None,
        None,
    ),
    "rate": (lambda k: made(D.Dropout(0.25 + k / 2)), None, None),
    "rates in another order": (
        lambda k: made(
            D.Dropout([0.25, 0.5][k]), D.Dense(2), D.Dropout([0.5, 0.25][k])
        ),
        None,
        None,
    ),
    "epsilon": (
        lambda k: made(D.LayerNormalization(epsilon=[1e-3, 2e-3][k])),
        None,
        None,
    ),
    "regularizer": (
        lambda k: made(D.Dense(2, kernel_regularizer=["l1", "l2"][k])),
        "Abs",
        "Square",
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
    "weights of losses": (
        lambda k: made(loss_weights=[1.0 + k]),
        None,
        None,
    ),
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
    "connections": (lambda k: connected(of=k), "", ""),
    "index": (lambda k: connected(index=k), None, None),
    "a constant in a branch": (lambda k: scanned(2.0 + k), None, None),
    "an operation in a branch": (
        lambda k: scanned(reverse=bool(k)),
        "Mul",
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
    assert one.is_like(*other.numbers)
    assert one.operations.checksums == other.operations.checksums


@pytest.mark.parametrize("what", UNLIKE)
def test_other_steps_are_told_apart(what):
    """By the first operation that differs; or by a constant, named so."""
    make, *shown = UNLIKE[what]
    one, other = (step_of(make(k)) for k in range(2))
    assert not one.is_like(*other.numbers)
    checksums = [step.operations.checksums for step in (one, other)]
    firsts = [
        step.operations.first_beside(others)
        for step, others in zip((one, other), reversed(checksums), strict=True)
    ]
    if shown == [None, None]:
        assert firsts == shown
        described = [set(step.constants.described) for step in (one, other)]
        assert described[0] != described[1]
        return
    for first, text in zip(firsts, shown, strict=True):
        assert first is not None and first.result.startswith(text)


def test_an_operation_is_shown_with_the_line_of_the_user():
    one, other = (
        step_of(made(D.Lambda(act)))
        for act in (lambda x: x * 2.0, lambda x: tf.nn.tanh(x) * 2.0)
    )
    first = other.operations.first_beside(one.operations.checksums)
    assert str(first).startswith("Tanh float32 (None, 4, 2) of test_traced_op")
    assert "lambda x: tf.nn.tanh(x)" in first.line


def test_attributes_are_shown():
    one, other = (step_of(UNLIKE["strides"][0](k)) for k in range(2))
    first = one.operations.first_beside(other.operations.checksums)
    assert first.attributes["strides"] == "[1, 1, 1, 1]"


def test_what_is_not_needed_does_not_count_but_the_order_does():
    def traced(swaps, prints):
        def step(x):
            parts = [lambda: tf.sin(x), lambda: tf.cos(x)]
            if prints:
                tf.print(tf.exp(x))
            found = {k: parts[k]() for k in ((1, 0) if swaps else (0, 1))}
            return found[0] - found[1]

        @tf.function
        def outer():
            spec = tf.TensorSpec([3])
            traces.append(trace(step, spec, "predict", None))

        traces = []
        outer.get_concrete_function()
        return TracedOperations(traces[0], keras.Sequential()).described

    one, prints, other = (
        traced(*options) for options in ((0, 0), (0, 1), (1, 0))
    )
    assert one.checksum == prints.checksum != other.checksum
    first = other.first_beside(one.checksums)
    assert first is not None and first.result.startswith("Cos")
