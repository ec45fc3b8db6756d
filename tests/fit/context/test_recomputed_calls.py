"""What users let recompute is called once in a strategy's block."""

import contextlib
import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_close, assert_same_model

layers = keras.layers
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
STEPS = 3
has_scopes = pytest.mark.skipif(
    not hasattr(keras, "RematScope"), reason="this Keras has no RematScope"
)


def plainly(function):
    return function


class Block(layers.Layer):
    """Draws, counts, normalizes, and captures what has a gradient.

    Args:
        wrap: lets the function recompute.
        parts: what it does.
    """

    def __init__(self, wrap, parts=("draw", "count", "normalize", "capture")):
        super().__init__()
        self.wrap, self.parts = wrap, parts
        self.context, self.dense = layers.Dense(4), layers.Dense(4)
        self.dropout = layers.Dropout(0.3, seed=5)
        self.norm = layers.BatchNormalization()
        self.count = self.add_weight(initializer="zeros", trainable=False)

    def build(self, shape):
        for layer in (self.context, self.dense, self.norm):
            layer.build((None, 4))

    def call(self, x, training=None):
        context = self.context(x)
        if "stopped" in self.parts:
            context = tf.stop_gradient(context)

        def inner(x):
            x = self.dense(x)
            if "draw" in self.parts:
                x = self.dropout(x, training=training)
            if "fixed" in self.parts:
                x += tf.random.stateless_normal(tf.shape(x), (1, 2))
            if "stream" in self.parts:
                x += tf.random.normal(tf.shape(x))
            if "normalize" in self.parts:
                x = self.norm(x, training=training)
            if "count" in self.parts and training:
                self.count.assign_add(1.0)
                x *= 1 + 0.1 * self.count
            if {"capture", "stopped"}.intersection(self.parts):
                x *= context
            return tf.nn.tanh(x)

        return self.wrap(inner)(x)


def compiled(wrap=tf.recompute_grad, *parts, **options):
    keras.utils.set_random_seed(3)
    block = Block(wrap, parts) if parts else Block(wrap)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), block, layers.Dense(1)]
    )
    options = {"jit_compile": False, **options}
    model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    return model, block


def fit(model, **options):
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **options)
    return model


@functools.cache
def called_plainly():
    return fit(compiled(plainly)[0])


def parallel():
    devices = keras.distribution.list_devices("cpu")[:1]
    return keras.distribution.DataParallel(devices=devices).scope()


STRATEGIES = {
    "one": lambda: kt.TowerStrategy(1),
    "one-remat": lambda: kt.TowerStrategy(1, remat=True),
    "three": lambda: kt.TowerStrategy(3),
    "none": lambda: kt.TowerStrategy(2, remat=False),
    "servers": lambda: kt.ParameterServerTowerStrategy(2),
    "parallel": parallel,
}


@pytest.mark.parametrize(
    ("name", "eagerly"),
    [*((name, False) for name in STRATEGIES), ("one", True), ("three", True)],
)
def test_every_strategy_calls_a_function_once(name, eagerly):
    model, _ = compiled(run_eagerly=eagerly)
    with STRATEGIES[name]():
        fit(model)
    assert_same_model(model, called_plainly())


@pytest.mark.parametrize("compiles", [False, True])
def test_asynchronous_towers_call_it_once(compiles):
    model, block = compiled(jit_compile=compiles)
    with kt.AsyncTowerStrategy(2):
        fit(model)
    assert float(block.count) == STEPS


@pytest.mark.parametrize("towers", [1, 2])
def test_replicas_of_a_custom_loop_call_it_once(towers):
    model, block = compiled()

    def compute(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return tape.gradient(loss, block.context.kernel)

    function = tf.function(compute)
    assert function(X) is None
    assert float(block.count) == 2
    strategy = kt.TowerStrategy(towers)
    with strategy.scope():
        found = strategy.experimental_local_results(strategy.run(function, [X]))
        assert all(gradient is not None for gradient in found)
    assert function(X) is None


def test_traces_of_one_tower_are_its_own():
    """Neither side uses what the other one has traced."""
    model, block = compiled()
    counts = []
    blocks = [contextlib.nullcontext, STRATEGIES["one"]] * 2
    for enter in blocks:
        before = float(block.count)
        with enter():
            fit(model)
        counts.append(float(block.count) - before)
    assert counts == [2 * STEPS, STEPS] * 2


class Calls(layers.Layer):
    """Calls functions, one after the other."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def call(self, x):
        for function in self.functions:
            x = function(x)
        return x


@pytest.mark.parametrize("towers", [1, 2])
def test_only_traces_that_call_a_function_twice_are_not_used_again(towers):
    traced = []

    def noting(name, function):
        def noted(x):
            traced.append(name)
            return function(x)

        signature = [tf.TensorSpec([None, 4])]
        return tf.function(noted, signature, autograph=False)

    inner = noting("inner", tf.recompute_grad(tf.math.tanh))
    outer, other = noting("outer", inner), noting("other", tf.math.sin)
    functions = inner, outer, other
    for function in functions:
        function(X)
    assert traced == ["inner", "outer", "other"]
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), Calls(*functions)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    traced.clear()
    with kt.TowerStrategy(towers):
        fit(model)
    assert sorted(traced) == ["inner", "outer"]
    # Each side has its own now.
    fit(model)
    with kt.TowerStrategy(towers):
        fit(model)
    assert len(traced) == 2


FOUND = {
    "draw": "draws other numbers",
    "stream": "draws other numbers",
    "count": "writes twice",
    "normalize": "writes twice",
    "capture": "gives no gradients to what it captures",
    "fixed": None,
    "stopped": None,
    "nothing": None,
}


@pytest.mark.parametrize(
    ("part", "towers"), [(part, 1 + n % 2) for n, part in enumerate(FOUND)]
)
def test_the_log_says_once_how_plain_keras_differs(part, towers, caplog):
    model, _ = compiled(tf.recompute_grad, part)
    caplog.set_level(logging.INFO, "keras_towers")
    with kt.TowerStrategy(towers):
        fit(model)
        fit(model)
        model.predict(X, verbose=0)
    said = [line for line in caplog.messages if "Plain Keras" in line]
    assert len(said) == (FOUND[part] is not None)
    for line in said:
        assert f"training of {model.name!r} calls Block.call" in line
        assert FOUND[part] in line


@pytest.mark.parametrize("towers", [1, 2])
def test_verify_names_it_beside_the_number(towers):
    strategy = kt.TowerStrategy(towers)
    found = kt.verify(compiled()[0], X, Y, batch_size=8, strategy=strategy)
    assert found.difference > 0.01
    (cause,) = found.causes
    for words in ("Block.call", *filter(None, FOUND.values())):
        assert words in cause
    assert f"by rounding alone).\n{cause}\n" in str(found)
    same = kt.verify(compiled(plainly)[0], X, Y, strategy=strategy)
    assert not same.causes


def test_a_branch_may_let_recompute():
    model, block = compiled(
        lambda inner: (
            lambda x: tf.cond(
                tf.size(x) > 0, lambda: tf.recompute_grad(inner)(x), lambda: x
            )
        )
    )
    with kt.TowerStrategy(1):
        fit(model)
    assert float(block.count) == STEPS


def scoped(mode="full"):
    keras.utils.set_random_seed(3)
    with keras.RematScope(mode, 2, ["first"]):
        first = layers.Dense(8, "relu", name="first")
        drop = layers.Dropout(0.3, seed=1)
    model = keras.Sequential([keras.Input((4,)), first, drop, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


SCOPES = {
    "one": "full",
    "one-remat": "larger_than",
    "three": "full",
    "parallel": "list_of_layers",
    "asynchronous": "activations",
}


@has_scopes
@pytest.mark.parametrize("name", SCOPES)
def test_layers_of_a_scope_work_in_the_block_and_after_it(name, tmp_path):
    make = STRATEGIES.get(name, lambda: kt.AsyncTowerStrategy(2))
    with make():
        model = fit(scoped(SCOPES[name]))
        inside = model.predict(X, verbose=0)
    assert_close(model.predict(X, verbose=0), inside)
    assert model.evaluate(X, Y, verbose=0) > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(X, verbose=0), inside)
    model.export(tmp_path / "exported", verbose=False)
    # One device trains its layers, too.
    again = keras.Sequential([keras.Input((4,)), *model.layers])
    again.compile("sgd", "mse", jit_compile=False)
    fit(again)


@has_scopes
def test_a_scope_outside_of_blocks_is_that_of_keras():
    with kt.TowerStrategy(2):
        inside = scoped().layers[0]._remat_mode
        assert inside.mode == "full"
    assert inside.mode is None
    outside = scoped().layers[0]._remat_mode
    assert outside == inside
    assert outside.mode == "full"
