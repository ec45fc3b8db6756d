"""Towers draw their rows of what one device would draw, bit by bit."""

import itertools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit import told
from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.rows import Rows
from keras_towers.fit.hooks import keras as hooks

COUNTS = (5, 1, 7, 3)
SEED = [7, 42]
FLOATS = ("float16", "bfloat16", "float32", "float64")
random = tf.random


@pytest.fixture(autouse=True)
def warned(caplog, monkeypatch):
    """The warnings of a test, each of which is logged once in a process."""
    monkeypatch.setattr(told, "_said", set())
    caplog.set_level(logging.WARNING, "keras_towers")
    yield lambda: [
        r.getMessage() for r in caplog.records if r.name == "keras_towers"
    ]


def _data(tail):
    total = sum(COUNTS)
    size = total * int(np.prod(tail))
    return np.linspace(0.1, 3, size, dtype="float32").reshape(total, *tail)


def on_towers(draw, x, counts=COUNTS, eager=False):
    """What each tower draws for its rows of ``x``."""
    starts = itertools.accumulate(counts, initial=0)
    found = []
    for index, (start, count) in enumerate(zip(starts, counts, strict=False)):

        def step(piece, start, index=index):
            rows = Rows(
                start,
                tf.shape(piece, out_type=tf.int64)[0],
                tf.constant(len(x), tf.int64),
                None if eager else tf.compat.v1.get_default_graph(),
            )
            tower = tower_lib.Tower(index, len(counts), share=0.5, rows=rows)
            with replica_context.activate(tower):
                return draw(rows.mark(piece))

        run = step if eager else tf.function(step)
        with hooks.installed():
            found.append(
                run(
                    tf.constant(x[start : start + count]),
                    tf.constant(start, tf.int64),
                ).numpy()
            )
    return found


def assert_rows(draw, x, axis=0, **kwargs):
    wanted = tf.function(draw)(tf.constant(x)).numpy()
    found = on_towers(draw, x, **kwargs)
    np.testing.assert_array_equal(np.concatenate(found, axis), wanted)


def _of(op, dtype, **kwargs):
    def draw(x):
        return op(tf.shape(x), SEED, dtype=dtype, **kwargs)

    return draw


COUNTED = {
    **{f"uniform {d}": _of(random.stateless_uniform, d) for d in FLOATS},
    **{f"normal {d}": _of(random.stateless_normal, d) for d in FLOATS},
    **{
        f"truncated {d}": _of(random.stateless_truncated_normal, d)
        for d in FLOATS
    },
    **{
        f"integers {d}": _of(
            random.stateless_uniform, d, minval=-9, maxval=1000
        )
        for d in ("int32", "int64", "uint32", "uint64")
        if not d.startswith("u")
    },
    **{
        f"all integers {d}": _of(
            random.stateless_uniform, d, minval=None, maxval=None
        )
        for d in ("int32", "int64", "uint32", "uint64")
    },
    "dropout": lambda x: tf.nn.experimental.stateless_dropout(x, 0.4, SEED),
    "philox": lambda x: random.stateless_normal(
        tf.shape(x), SEED, alg="philox"
    ),
    "keras": lambda x: keras.random.normal(keras.ops.shape(x), seed=4),
    "int64 shape": lambda x: random.stateless_normal(
        tf.shape(x, out_type=tf.int64), SEED
    ),
}

CUT = {
    "gamma": lambda x: random.stateless_gamma(tf.shape(x), SEED, 2.0),
    "gamma of each": lambda x: random.stateless_gamma(tf.shape(x), SEED, x),
    "poisson": lambda x: random.stateless_poisson(tf.shape(x), SEED, 2.0),
    "poisson of each": lambda x: random.stateless_poisson(
        tf.shape(x), SEED, 20 * x
    ),
    "binomial": lambda x: random.stateless_binomial(
        tf.shape(x), SEED, 5.0, 0.3
    ),
    "binomial of each": lambda x: random.stateless_binomial(
        tf.shape(x), SEED, 40.0, x / 4
    ),
    "beta": lambda x: keras.random.beta(keras.ops.shape(x), 2.0, x, seed=4),
    "truncated of each": lambda x: (
        random.stateless_parameterized_truncated_normal(
            tf.shape(x), SEED, x, 1.0, -2.0, 4.0
        )
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("tail", [(4,), (3,), (3, 5)], ids=str)
@pytest.mark.parametrize("name", COUNTED)
def test_rows_of_a_draw(name, tail, warned):
    assert_rows(COUNTED[name], _data(tail))
    assert not warned()


@pytest.mark.parametrize("name", CUT)
def test_rows_of_a_draw_with_rejections(name, warned):
    assert_rows(CUT[name], _data((3,)))
    assert not warned()


def test_categories(warned):
    assert_rows(lambda x: random.stateless_categorical(x, 3, SEED), _data((4,)))
    assert not warned()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_counts_beyond_32_bits(rows):
    """Far into a draw, where the whole one would not fit into memory."""
    start = 2**33

    def draw(x):
        return random.stateless_uniform(tf.shape(x), SEED)

    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    counter += tf.constant([start, 0], tf.uint64)
    wanted = tf.raw_ops.StatelessRandomUniformV2(
        shape=[rows, 4], key=key, counter=counter, alg=1
    )

    @tf.function
    def step(piece):
        graph = tf.compat.v1.get_default_graph()
        rows = Rows(*map(_int64, (start, len(piece), 2 * start)), graph)
        tower = tower_lib.Tower(0, 2, share=0.5, rows=rows)
        with replica_context.activate(tower):
            return draw(rows.mark(piece))

    with hooks.installed():
        found = step(tf.zeros([rows, 4]))
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def _int64(value):
    return tf.constant(value, tf.int64)


def _dropped(x):
    return tf.nn.experimental.stateless_dropout(x, 0.4, SEED)


def _loop(x):
    """One element for each example, written in a loop."""
    return tf.map_fn(lambda row: 2 * row, x)


SHAPES = {
    "first of the shape": lambda x: random.stateless_normal(
        [tf.shape(x)[0], 5], SEED
    ),
    "sliced shape": lambda x: random.stateless_normal(
        tf.concat([tf.shape(x)[:-1], [2]], 0), SEED
    ),
    "by keras": lambda x: keras.random.normal(
        (keras.ops.shape(x)[0], 1, 6), seed=4
    ),
    "after layers": lambda x: _dropped(
        tf.nn.relu(x @ tf.ones([6, 3]) + 1) @ tf.ones([3, 6])
    ),
    "twice": lambda x: _dropped(_dropped(x)[:, :3]),
    "reshaped and back": lambda x: _dropped(
        tf.reshape(tf.reshape(x, [-1, 2]) + 1, [-1, 6])
    ),
    "flattened": lambda x: _dropped(
        tf.reshape(tf.reshape(x, [-1, 2, 3]), [tf.shape(x)[0], -1])
    ),
    "in tensordot": lambda x: _dropped(
        tf.tensordot(tf.reshape(x, [-1, 2, 3]), tf.ones([3, 4]), 1)
    ),
    "groups of rows": lambda x: _dropped(tf.reshape(x, [-1, 2])),
    "reduced": lambda x: _dropped(tf.reduce_mean(x, 1)),
    "in einsum": lambda x: _dropped(tf.einsum("bi,ij->bj", x, tf.ones([6, 4]))),
    "after a loop": lambda x: _dropped(_loop(x)),
    "in a conditional": lambda x: tf.cond(
        tf.shape(x)[1] > 2, lambda: _dropped(x), lambda: x
    ),
    "after a conditional": lambda x: _dropped(
        tf.cond(tf.reduce_sum(x) > 1e9, lambda: x, lambda: 2 * x)
    ),
    "gathered": lambda x: _dropped(
        tf.gather(tf.ones([9, 4]), tf.cast(x[:, 0], tf.int32))
    ),
    "one column": lambda x: _dropped(tf.expand_dims(x[:, 2], -1)),
    "repeated": lambda x: _dropped(tf.tile(x[:, :3], [1, 2])),
    "one hot": lambda x: _dropped(tf.one_hot(tf.cast(x[:, 0], tf.int32), 3)),
    "transposed twice": lambda x: _dropped(tf.transpose(tf.transpose(x) + 1)),
    "range": lambda x: _dropped(
        tf.cast(0 * tf.range(tf.shape(x)[0]), tf.float32) + 1
    ),
    "padded": lambda x: _dropped(tf.pad(x, [[0, 0], [1, 2]])),
    "interleaved": lambda x: _dropped(
        tf.reshape(tf.transpose(tf.stack([x, x + 1]), [1, 0, 2]), [-1, 6])
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_with_examples(name, warned):
    assert_rows(SHAPES[name], _data((6,)))
    assert not warned()


def test_examples_in_another_dimension(warned):
    assert_rows(
        lambda x: _dropped(tf.transpose(x, [1, 0, 2])), _data((3, 5)), axis=1
    )
    assert not warned()


def test_two_views_of_a_batch(warned):
    """All examples of one view come before those of the other."""

    def draw(x):
        views = _dropped(tf.concat([x, x + 1], 0))
        return tf.stack(tf.unstack(tf.reshape(views, [2, -1, 6])), 1)

    assert_rows(draw, _data((6,)))
    assert not warned()


@pytest.mark.parametrize(
    "shape", [(6, 6), (1, 6), (7, 2)], ids=["square", "one", "as many as rows"]
)
def test_a_static_shape_is_the_same_on_all_towers(shape, warned):
    """Also where its length is the number of a tower's rows by chance."""

    def draw(x):
        return random.stateless_normal(shape, SEED)

    for found in on_towers(draw, _data((6,))):
        np.testing.assert_array_equal(found, draw(None).numpy())
    assert not warned()


def test_a_dynamic_length_is_not_a_number_of_examples(warned):
    """Seven steps of time, where a tower has seven examples."""

    def draw(x):
        x = tf.compat.v1.placeholder_with_default(x, [None, None, 2])
        return random.stateless_normal([tf.shape(x)[1], 2], SEED)

    wanted = random.stateless_normal([7, 2], SEED).numpy()
    for found in on_towers(draw, _data((7, 2))):
        np.testing.assert_array_equal(found, wanted)
    assert not warned()


UNKNOWN = {
    "masked": lambda x: _dropped(tf.boolean_mask(x, x[:, 0] > -1)),
    "half": lambda x: _dropped(x[: (tf.shape(x)[0] + 1) // 2]),
    "sum": lambda x: random.stateless_normal([tf.shape(x)[0] + 1], SEED),
    "twice as many": lambda x: random.stateless_normal(
        [2 * tf.shape(x)[0]], SEED
    ),
    "similarities": lambda x: _dropped(tf.matmul(x, x, transpose_b=True)),
}


@pytest.mark.parametrize("name", ["masked", "half", "sum", "twice as many"])
def test_what_cannot_be_known_is_said(name, warned):
    found = on_towers(UNKNOWN[name], _data((6,)), counts=(8, 8))
    assert len(warned()) == 1
    assert "differs from one device" in warned()[0]
    # As with random="tower", no two towers draw the same.
    assert not np.array_equal(*found)


def test_similarities_of_a_batch_are_said_to_differ(warned):
    on_towers(UNKNOWN["similarities"], _data((6,)), counts=(8, 8))
    assert "differs from one device" in warned()[0]


def test_misunderstood_rows_fail(warned):
    """An operation without a rule, which does not keep the examples."""

    def draw(x):
        x = tf.reshape(x, [-1, 2, 3, 1])
        return _dropped(tf.space_to_batch(x, [2, 1], [[0, 0], [0, 0]]))

    with pytest.raises(tf.errors.InvalidArgumentError, match="random="):
        on_towers(draw, _data((6,)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: keras.random.shuffle(x, seed=4),
        lambda x: random.experimental.stateless_shuffle(x, SEED),
        lambda x: random.normal(tf.shape(x)),
        lambda x: tf.nn.dropout(x, 0.4),
        lambda x: random.shuffle(x),
    ],
    ids=["keras shuffle", "stateless", "normal", "dropout", "shuffle"],
)
def test_what_cannot_be_matched_is_said(draw, warned):
    on_towers(draw, _data((6,)), counts=(8, 8))
    assert len(warned()) == 1
    assert "differs from one device" in warned()[0]


def test_a_generator_is_said_to_differ(warned):
    generator = random.Generator.from_seed(4)
    on_towers(lambda x: generator.normal(tf.shape(x)), _data((6,)))
    assert len(warned()) == 1


def test_a_draw_for_each_round_of_a_loop_is_said(warned):
    def draw(x):
        return tf.map_fn(
            lambda row: row + random.stateless_normal([6], SEED), x
        )

    on_towers(draw, _data((6,)))
    assert len(warned()) == 1
    assert "in a loop" in warned()[0]


def test_inside_a_function_of_its_own_is_said(warned):
    def draw(x):
        @tf.function
        def inner(y):
            return _dropped(y)

        return inner(x)

    on_towers(draw, _data((6,)), counts=(8, 8))
    assert len(warned()) == 1


def test_eagerly_rows_are_counted(warned):
    assert_rows(_dropped, _data((6,)), counts=(7, 7, 2), eager=True)
    assert len(warned()) >= 1
    assert "run_eagerly" in warned()[0]


@pytest.mark.parametrize("share, rows", [(None, True), (0.5, False)])
def test_other_towers_draw_as_keras_does(share, rows):
    """Towers with an own batch, and those of random="tower"."""
    x = tf.constant(_data((6,)))
    wanted = _dropped(x).numpy()
    known = Rows(_int64(3), _int64(4), _int64(9)) if rows else None
    tower = tower_lib.Tower(1, 2, share=share, rows=known)
    with hooks.installed(), replica_context.activate(tower):
        found = _dropped(x).numpy()
    np.testing.assert_array_equal(found, wanted)
