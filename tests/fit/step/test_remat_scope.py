"""What users let be computed again, in the steps of towers."""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.graph import step_layout
from tests.kit.compare import assert_same_model

pytestmark = [
    pytest.mark.alternate,
    pytest.mark.skipif(
        not hasattr(keras, "RematScope"), reason="this Keras has no RematScope"
    ),
]
WIDTH = 16
layers = keras.layers


class Block(layers.Layer):
    """Two layers with dropout between, called with keyword arguments."""

    def __init__(self, wrap=lambda function: function):
        super().__init__()
        self.first = layers.Dense(2 * WIDTH)
        self.dropout = layers.Dropout(0.2, seed=7)
        self.second = layers.Dense(WIDTH, "tanh")
        self.compute = wrap(self.compute)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 2 * WIDTH))
        self.built = True

    def compute(self, x):
        x = keras.ops.gelu(self.first(x))
        return self.second(self.dropout(x, training=True))

    def call(self, inputs, scale=None):
        return inputs + scale * self.compute(inputs)


def under(wrap=lambda function: function, **options):
    """Make a block under a scope; one that it wraps is a segment in another."""
    with keras.RematScope(**options):
        return Block(wrap)


PLAIN = [Block] * 4
AGAIN = [
    functools.partial(under, mode="full"),
    functools.partial(under, mode="larger_than", output_size_threshold=8),
    lambda: Block(keras.remat),
    lambda: under(tf.recompute_grad, mode="full"),
]


def train(makers, strategy=None, jit_compile=False):
    """Train a model of blocks for two steps; return it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    generator = np.random.default_rng(4)
    data = generator.random((26, WIDTH)), generator.random((26, 1))
    with strategy or contextlib.nullcontext():
        inputs = x = keras.Input((WIDTH,))
        for make in makers:
            x = make()(x, scale=0.5)
        x = layers.BatchNormalization()(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            "mse",
            jit_compile=jit_compile,
        )
        model.fit(*data, batch_size=13, shuffle=False, verbose=0)
    return model


@functools.cache
def on_one_device(jit_compile=False):
    return train(PLAIN, jit_compile=jit_compile)


def exchanges(strategy):
    """Return how much a strategy has exchanged in training."""
    found = re.search(
        r"training.*: (\d+ exchanges? in \d+ rounds?)", strategy.describe()
    )
    assert found, strategy.describe()
    return found[1]


@pytest.fixture
def copies(monkeypatch):
    """The layers of blocks of which a step has copies, with their types."""
    found = set()

    def schedule(*args, **options):
        timeline = scheduled(*args, **options)
        for operation in timeline.program.operations:
            block = re.search(r"/(block(?:_\d+)*)/", operation.name)
            if block and operation.suffix.endswith("_again"):
                found.add((block[1], operation.type))
        return timeline

    scheduled = step_layout.schedule
    monkeypatch.setattr(step_layout, "schedule", schedule)
    return found


def blocks_of(copies):
    """Return the blocks of which products are computed again, with the rest."""
    blocks = {name for name, type_ in copies if type_ == "MatMul"}
    assert {name for name, type_ in copies if type_ == "Pow"} == blocks, copies
    return blocks


def test_blocks_are_computed_again(copies):
    strategy = kt.TowerStrategy(2)
    found = train(AGAIN, strategy)
    assert_same_model(found, on_one_device())
    assert len(blocks_of(copies)) == len(AGAIN), copies
    assert re.search(r"computes \d+ operations again", strategy.describe())
    with strategy:
        found.predict(np.ones((4, WIDTH)), verbose=0)
    # Nothing more is exchanged, and the option has the last word.
    copies.clear()
    plain = kt.TowerStrategy(2, remat=False)
    assert_same_model(train(AGAIN, plain), on_one_device())
    assert not copies
    assert exchanges(strategy) == exchanges(plain)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "sharded", "gather_bytes": 2**10},
        {"micro_batches": 2, "remat": True},
    ],
    ids=["shards", "parts"],
)
def test_other_towers_compute_blocks_again(options, copies, small_shards):
    strategy = kt.TowerStrategy(2, **options)
    assert_same_model(train(AGAIN, strategy), on_one_device())
    assert len(blocks_of(copies)) == len(AGAIN), copies
    plain = kt.TowerStrategy(2, **{**options, "remat": False})
    train(AGAIN, plain)
    assert exchanges(strategy) == exchanges(plain)


def test_xla_computes_blocks_again(copies):
    strategy = kt.TowerStrategy(2, updates="each")
    found = train(AGAIN, strategy, jit_compile=True)
    assert_same_model(found, on_one_device(jit_compile=True))
    assert len(blocks_of(copies)) == len(AGAIN), copies


def test_a_scope_ends_with_the_block():
    function = tf.recompute_grad(tf.math.exp)
    traced = tf.function(lambda x: function(x), autograph=False)
    before = traced.get_concrete_function(tf.TensorSpec([2])).graph
    with kt.TowerStrategy(2):
        pass
    after = tf.function(lambda x: function(x), autograph=False)
    types = [o.type for o in before.get_operations()]
    graph = after.get_concrete_function(tf.TensorSpec([2])).graph
    assert [o.type for o in graph.get_operations()] == types
    assert "IdentityN" in types
