"""Loops on towers with one round for each example."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.layout import layout_pass
from tests.partition import tensor_lists as lists
from tests.partition.kit import (
    check_divided,
    check_on_towers,
    partial_sum,
    replicated,
    sharded,
    with_gradients,
)
from tests.partition.layout_list import as_listed

pytestmark = pytest.mark.alternate


def _two(x, y):
    types = tf.float32, tf.float32
    return tf.map_fn(
        lambda pair: (pair[0] @ pair[1], tf.reduce_max(pair[1])),
        (x, y),
        fn_output_signature=types,
    )


def _with_loop(x):
    def each(e):
        often = tf.cast(tf.abs(e[0]) * 4, tf.int32)
        return tf.while_loop(
            lambda i, y: i < often,
            lambda i, y: (i + 1, tf.tanh(y * tf.reduce_sum(y) + e)),
            (0, e),
        )[1]

    return tf.map_fn(each, x)


def _by_keras(x):
    def each(e):
        return {"a": e * 2, "b": keras.ops.sum(keras.ops.tanh(e))}

    return keras.ops.map(each, x)


def _rounds(x, each, *start, **options):
    """Loop over the examples; return the final loop variables.

    Args:
        x: the examples.
        each: takes the number of a round, what reads examples, their number,
            and what goes round; returns the latter.
        *start: what goes round.
        **options: of ``tf.while_loop``.
    """
    n = tf.shape(x)[0]
    items = tf.TensorArray(tf.float32, n).unstack(x)
    found = tf.while_loop(
        lambda i, *_: i < n,
        lambda i, *state: (i + 1, *each(i, items.read, n, *state)),
        (0, *start),
        **options,
    )
    return found[1:]


def _drawn(x):
    def each(e):
        return tf.argmax(e + tf.random.stateless_normal((3,), (3, 4)))

    return tf.map_fn(each, x, fn_output_signature=tf.int64)


def _added_up(x, y):
    """The initial value of a sum counts once."""

    def each(i, read, n, s, t):
        return s + read(i), t + 2

    return _rounds(x, each, y, 5)


def _doubled(x):
    """A list is doubled in each round."""
    items = lists.list_of(x, [3])
    (found,) = _rounds(x, lambda i, read, n, y: (tf.add_n([y, y]),), items)
    return lists.stack(found, [3])


def test_what_is_the_same_on_all_towers_is_not_laid_out(monkeypatch):
    """Otherwise the time grows exponentially with the depth of loops."""
    laid_out = []
    apply_rules = layout_pass.apply_rules

    def note(node, inputs):
        laid_out.append(node.type)
        return apply_rules(node, inputs)

    monkeypatch.setattr(layout_pass, "apply_rules", note)
    check_divided(_with_loop, sharded(-1, 2))
    assert "Abs" in laid_out
    assert "Tanh" not in laid_out


# ---- what goes from one example to the next is computed once -----------------


def _wider_sum(x):
    shapes = tf.TensorShape([]), tf.TensorShape([None])
    each = lambda i, read, n, s: (s + read(i),)  # noqa: E731
    return _rounds(x, each, tf.zeros([1]), shape_invariants=shapes)


def _always_the_last(x):
    """Every iteration pops the last example of the same list."""
    items = lists.list_of(x, [3])
    each = lambda i, read, n, s: (s + lists.pop(items, [3])[1],)  # noqa: E731
    return _rounds(x, each, tf.zeros([3]))


def _swapped(x):
    """Lists that change places."""
    n = tf.shape(x)[0]
    lists = [tf.TensorArray(tf.float32, n).unstack(x * k) for k in (1, 2)]

    def each(i, read, n, a, b):
        return b.write(i, a.read(i) + 1), a

    return [found.stack() for found in _rounds(x, each, *lists)]


def _anew(x):
    """Lists of which only the last round's is left."""

    def made(n):
        return tf.TensorArray(tf.float32, n, element_shape=(3,))

    def each(i, read, n, _):
        return (made(n).write(i, read(i)),)

    return _rounds(x, each, made(tf.shape(x)[0]))[0].stack()


def _ragged(x):
    """Each example becomes a row of as many entries as it says."""

    def each(e):
        return e[: tf.cast(tf.abs(e[0]) * 3, tf.int32)] * 2

    of_rows = tf.RaggedTensorSpec([None], tf.float32)
    return tf.map_fn(each, x, fn_output_signature=of_rows).to_tensor()


_X = sharded(-1, 3)
LOOPS = {
    "two": (with_gradients(_two), sharded(-1, 2, 3), sharded(-1, 3, 2)),
    # It looks at the first example, whose values nobody needs.
    "keras.ops.map": (with_gradients(_by_keras), _X),
    "draws": (_drawn, _X),
    "from what all have": (_added_up, _X, replicated(3)),
    "from a sum": (_added_up, _X, partial_sum(3)),
    "a list that is doubled": (_doubled, _X),
    "ragged rows": (with_gradients(_ragged), _X),
    "texts": (
        lambda texts: tf.map_fn(
            lambda text: (tf.strings.upper(text), tf.strings.length(text)),
            texts,
            fn_output_signature=(tf.string, tf.int32),
        ),
        sharded(-1, dtype="string"),
    ),
    **{
        f"{way.__name__.strip('_')}{more}": (wrap(way), _X)
        for way in (_anew, _wider_sum, _always_the_last, _swapped)
        for more, wrap in (
            ("", lambda f: f),
            (", with gradients", with_gradients),
        )
    },
}
test_loops_over_examples = as_listed("row loops", LOOPS, exchanges=True)


def test_effects_are_those_of_one_device():
    calls = []

    def note(e):
        calls.append(np.asarray(e).tolist())
        return e

    def each(e):
        found = tf.numpy_function(note, [e], tf.float32)
        return tf.ensure_shape(found, (2,)) * 2

    check_on_towers(
        lambda x: tf.map_fn(each, x), sharded(-1, 2), towers=((3, 0, 2),)
    )
    # One device, which is looked at as well, and all towers together.
    assert sorted(calls) == sorted(calls[:5] * 3)


def test_examples_that_make_elements_of_unlike_shapes():
    def total(x):
        # Of each example as many entries as it says: they cannot be stacked.
        def each(i, read, n, y):
            often = tf.cast(tf.abs(read(i)[0]) * 3, tf.int32)
            return (y.write(i, tf.tile(read(i), [often + 1])),)

        found = tf.TensorArray(tf.float32, tf.shape(x)[0], infer_shape=False)
        return _rounds(x, each, found)[0].concat()

    check_on_towers(total, sharded(-1, 2), towers=((3, 0, 2), (1, 4)))
