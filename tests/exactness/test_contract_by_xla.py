"""Every case of the contract with XLA: it compiles what one device compiles.

Towers draw what it draws, too.
"""

import functools
import itertools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance.cases import CASES, HARDEST
from keras_towers.inspection.conformance.strategy_check import on_one_device
from tests.kit.compare import assert_exact, assert_same, use_model
from tests.kit.sampling import sample_of
from tests.kit.training import X, Y, seeded, stacked

pytestmark = pytest.mark.alternate

# XLA rounds fused operations differently.
ROUNDING = 1e-5
DRAWN = 12
SOME = *HARDEST, "draws", "loss-scale-overflow"


def trained(model):
    """Two batches of one size, which the trace does not know.

    XLA compiles again for each other size.
    """
    data = tf.data.Dataset.from_tensor_slices((X[:14], Y[:14])).batch(7)
    return model.fit(data, verbose=0).history


def with_xla(build):
    model = build()
    model.jit_compile = not model.run_eagerly
    return model


WAYS = {
    "two with copies": functools.partial(kt.TowerStrategy, 2, updates="each"),
    "three with copies": functools.partial(kt.TowerStrategy, 3, updates="each"),
    "in shares": functools.partial(kt.TowerStrategy, 2, updates="sharded"),
    "computed again": functools.partial(
        kt.TowerStrategy, 2, updates="each", remat=True
    ),
    "towers": functools.partial(kt.TowerStrategy, 3),
    "with weights in shards": functools.partial(
        kt.TowerStrategy, 2, weights="sharded"
    ),
    "in parts": functools.partial(kt.TowerStrategy, 2, micro_batches=3),
    # XLA does not use variables of other devices: it is given values.
    "held once": functools.partial(
        kt.ParameterServerTowerStrategy, 2, ps_device="towers"
    ),
}


_CASES = [
    (name, way)
    for name, way in itertools.product(CASES, WAYS)
    if way == "two with copies" or name in SOME
]


@pytest.mark.parametrize(("name", "way"), sample_of(_CASES, DRAWN))
def test_towers_compile_all_functions(name, way, functions, small_shards):
    case = CASES[name]
    build = functools.partial(with_xla, case.build)
    found = use_model(build, case.fit, WAYS[way]())
    assert functions["not"] == []
    assert functions["compiled"] or build().run_eagerly
    # Of what is drawn XLA has other numbers.
    alone = name != "draws"
    wanted = on_one_device(case) if alone else use_model(build, case.fit)
    assert_same(found, wanted, max(case.tolerance, ROUNDING))


class Drawing(keras.Model):
    """Each output has a part of random numbers that are drawn for it."""

    def __init__(self, draw):
        super().__init__()
        self.hidden = keras.layers.Dense(6, "tanh")
        self.out = keras.layers.Dense(3)
        self.seeds = keras.random.SeedGenerator(7)
        self.draw = draw

    def call(self, x):
        hidden = self.hidden(x)
        drawn = self.draw(hidden, self.seeds)
        noise = tf.reduce_sum(tf.cast(drawn, "float32"), -1, keepdims=True)
        return self.out(hidden + 0.1 * noise)


class Counting(keras.layers.Layer):
    """Counts large batches in a branch, and reads what it has written."""

    def build(self, shape):
        self.large = tf.Variable(0.0, trainable=False)
        self.rounds = tf.Variable(0.0, trainable=False)

    def call(self, x):
        def count():
            self.large.assign_add(1.0)
            return tf.identity(self.large)

        is_large = tf.reduce_sum(x) > 0.0
        found = tf.cond(is_large, count, lambda: tf.identity(self.large))
        self.rounds.assign_add(found)

        def round_(k, y):
            y += 0.01 * self.rounds
            self.rounds.assign_add(tf.cond(is_large, count, lambda: 0.5))
            return k + 1, y + 0.01 * self.large

        # A condition reads what a round has written.
        until = tf.identity(self.rounds) + 2.0
        _, scaled = tf.while_loop(
            lambda k, _: (k < 4) & (self.rounds < until), round_, (0, x)
        )

        def add_up(k):
            # Of the rows of all towers.
            self.large.assign_add(0.01 * tf.reduce_mean(scaled))
            return (k + 1,)

        tf.while_loop(lambda k: k < 2, add_up, (0,))
        return scaled


def test_branches_and_loops_that_write_are_compiled(functions):
    def layers():
        dense = keras.layers.Dense
        return [Counting(), dense(5, "tanh"), dense(3)]

    make = stacked(layers, jit_compile=True)

    def act(model):
        logs = trained(model)
        layer = model.layers[0]
        return logs, float(layer.large), float(layer.rounds)

    strategy = kt.TowerStrategy(3, updates="each")
    assert_exact(make, act, strategy, tolerance=ROUNDING)
    assert functions["not"] == []


class Choosing(keras.layers.Layer):
    """Scales by a branch that keeps entries, of which values say how many."""

    def build(self, shape):
        start = keras.initializers.RandomNormal(seed=1)
        self.scale = self.add_weight(shape=shape[-1:], initializer=start)

    def call(self, x):
        scale = tf.convert_to_tensor(self.scale)
        return x * tf.cond(
            tf.reduce_sum(scale) > -9.0,
            lambda: tf.reduce_sum(tf.tanh(scale[scale > 0.0])),
            lambda: tf.reduce_sum(scale),
        )


def test_what_branches_keep_for_another_level_is_not_compiled(functions):
    def layers():
        dense = keras.layers.Dense
        return [dense(5, "tanh"), Choosing(), dense(3)]

    make = stacked(layers, jit_compile=True)
    strategy = kt.TowerStrategy(3, updates="each")
    assert_exact(make, trained, strategy, tolerance=ROUNDING)
    (reason,) = functions["not"]
    assert reason.startswith("gets a value that a branch keeps")


def _drawn_in_branches(x, seed):
    """What one branch keeps for its gradient, the other one leaves out."""
    number = keras.random.uniform((), seed=seed)
    pair = seed.next()
    found = tf.cond(
        number > 0.5,
        lambda: x + 0.1,
        lambda: x * tf.random.stateless_uniform(tf.shape(x), pair),
    )
    found += keras.random.shuffle(x, seed=seed)
    # On towers: the gradients of the rows are gathered for the branches.
    return keras.random.dropout(tf.tanh(found), 0.3, seed=seed)


def test_branches_that_draw_for_their_gradients(functions):
    make = seeded(lambda: Drawing(_drawn_in_branches), jit_compile=True)

    def act(model):
        data = tf.data.Dataset.from_tensor_slices((X[:15], Y[:15])).batch(5)
        return model.fit(data, epochs=3, verbose=0).history

    strategy = kt.TowerStrategy(3, updates="each")
    assert_exact(make, act, strategy, tolerance=ROUNDING, in_graph=True)
    assert not functions["not"]
