"""Towers have the draws of one device, bit by bit, whatever is drawn."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.step.acts import Acts

pytestmark = pytest.mark.alternate

# 5, 4 and 4 on three towers.
COUNT = 13
SEED = [7, 42]
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64", "uint32", "uint64")
random = tf.random


def _data(tail, count=COUNT):
    size = count * int(np.prod(tail))
    return np.linspace(0.1, 3, size, dtype="float32").reshape(count, *tail)


def assert_drawn_as_on_one_device(draw, x):
    """Three towers draw the numbers of one device.

    Returns:
        The description of the strategy.
    """
    inputs = keras.Input([None if size == 7 else size for size in x.shape[1:]])
    model = keras.Model(inputs, Acts(draw)(inputs))
    strategy = kt.TowerStrategy(3)
    GENERATOR.reset_from_seed(4)
    with strategy:
        found = model.predict(x, batch_size=len(x), verbose=0)
    GENERATOR.reset_from_seed(4)
    for name, wanted in draw(tf.constant(x)).items():
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)
    return strategy.describe()


def all_of(draws):
    return lambda x: {name: draw(x) for name, draw in draws.items()}


def _dropped(x):
    return tf.nn.experimental.stateless_dropout(x, 0.4, SEED)


def _normal(shape):
    return random.stateless_normal(shape, SEED)


OPERATIONS = [
    (random.stateless_uniform, FLOATS, {}),
    (random.stateless_normal, FLOATS, {}),
    (random.stateless_truncated_normal, FLOATS[2:], {}),
    (random.stateless_uniform, INTEGERS[:2], {"minval": -9, "maxval": 1000}),
    (random.stateless_uniform, INTEGERS, {"minval": None, "maxval": None}),
    (random.stateless_normal, ["float32"], {"alg": "philox"}),
]


def _of(op, dtype, options):
    return lambda x: op(tf.shape(x), SEED, dtype=dtype, **options)


COUNTED = {
    f"{op.__name__} {dtype} {options}": _of(op, dtype, options)
    for op, dtypes, options in OPERATIONS
    for dtype in dtypes
}
COUNTED |= {
    "dropout": _dropped,
    "keras": lambda x: keras.random.normal(keras.ops.shape(x), seed=4),
    "int64 shape": lambda x: _normal(tf.shape(x, out_type=tf.int64)),
}

CUT = {
    "gamma": lambda x: random.stateless_gamma(tf.shape(x), SEED, 2.0),
    "gamma of each": lambda x: random.stateless_gamma(tf.shape(x), SEED, x),
    "poisson of each": lambda x: random.stateless_poisson(
        tf.shape(x), SEED, 20 * x
    ),
    "binomial of each": lambda x: random.stateless_binomial(
        tf.shape(x), SEED, 40.0, x / 4
    ),
    "beta": lambda x: keras.random.beta(keras.ops.shape(x), 2.0, x, seed=4),
    "categories": lambda x: random.stateless_categorical(x, 3, SEED),
    "truncated of each": lambda x: (
        random.stateless_parameterized_truncated_normal(
            tf.shape(x), SEED, x, 1.0, -2.0, 4.0
        )
    ),
}


SHAPES = {
    "first of the shape": lambda x: _normal([tf.shape(x)[0], 5]),
    "sliced shape": lambda x: _normal(tf.concat([tf.shape(x)[:-1], [2]], 0)),
    "in a conditional": lambda x: tf.cond(
        tf.shape(x)[1] > 2, lambda: _dropped(x), lambda: x
    ),
}
DROPPED = {
    "twice": lambda x: _dropped(x)[:, :3],
    "flattened": lambda x: tf.reshape(
        tf.reshape(x, [-1, 2, 3]), [tf.shape(x)[0], -1]
    ),
    "groups of rows": lambda x: tf.reshape(x, [-1, 2]),
    "transposed twice": lambda x: tf.transpose(tf.transpose(x) + 1),
    "range": lambda x: tf.cast(tf.range(tf.shape(x)[0]) > -1, tf.float32),
}
SHAPES |= {
    name: lambda x, of=of: _dropped(of(x)) for name, of in DROPPED.items()
}


def in_another_dimension(x):
    turned = _dropped(tf.transpose(x, [1, 0, 2]))
    return {"turned": tf.transpose(turned, [1, 0, 2])}


def two_views(x):
    """All examples of the first view come before the second view."""
    views = _dropped(tf.concat([x, x + 1], 0))
    return {"views": tf.stack(tf.unstack(tf.reshape(views, [2, -1, 6])), 1)}


def the_same_on_all_towers(x):
    """Also where its length is the number of a tower's rows by chance."""
    # Seven steps of time, where a tower has seven examples.
    shapes = (6, 6), (1, 6), (7, 2), [tf.shape(x)[1], 2]
    sums = [tf.reduce_sum(_normal(shape)) for shape in shapes]
    return {"sums": tf.zeros_like(x[:, 0, :1]) + sums}


GENERATOR = random.Generator.from_seed(4)


def _generated(x):
    return GENERATOR.normal(tf.shape(x))


WHOLE = {
    "masked": lambda x: _dropped(tf.boolean_mask(x, x[:, 0] > 1)),
    "half": lambda x: _dropped(x[: (tf.shape(x)[0] + 1) // 2]),
    "sum": lambda x: _normal([tf.shape(x)[0] + 1]),
    "twice as many": lambda x: _normal([2 * tf.shape(x)[0]]),
    "similarities": lambda x: _normal(
        tf.shape(tf.matmul(x, x, transpose_b=True))
    ),
    "in a function of its own": lambda x: tf.function(_dropped)(x),
    "keras shuffle": lambda x: keras.random.shuffle(x, seed=4),
    "stateless": lambda x: random.experimental.stateless_shuffle(x, SEED),
    "generator": _generated,
    "in a loop": lambda x: tf.map_fn(lambda row: row + _normal([6]), x),
}


@pytest.mark.parametrize("tail", [(3, 5), (4,)])
def test_each_tower_draws_its_own_rows(tail):
    """Also where rows begin within a Philox count, and where it has none."""
    described = assert_drawn_as_on_one_device(all_of(COUNTED), _data(tail))
    assert "computed once" not in described
    assert_drawn_as_on_one_device(all_of(COUNTED), _data(tail, 1))


@pytest.mark.parametrize(
    ("draw", "x"),
    [
        # With rejections.
        (all_of(CUT), _data((3,))),
        (all_of(SHAPES), _data((6,))),
        (all_of(WHOLE), _data((6,), 12)),
        (in_another_dimension, _data((3, 5))),
        (two_views, _data((6,))),
        (the_same_on_all_towers, _data((7, 2), 21)),
    ],
    ids=["cut", "shapes", "whole", "turned", "views", "same"],
)
def test_towers_draw_the_numbers_of_one_device(draw, x):
    assert_drawn_as_on_one_device(draw, x)
