"""Dimensions are followed to the data through what is computed of shapes."""

import pytest
import tensorflow as tf

from keras_towers.fit.context.rows import Rows
from keras_towers.fit.step.dimensions import SAME, Dimensions

LENGTH, WIDTH = 5, 3
ROWS = (1,)  # one for each example


def explained(make):
    """The dimensions of what is made of a tower's rows, or of a scalar.

    Args:
        make: is given rows of shape [examples, LENGTH, WIDTH], where the
            examples are not static, and a length that is not static, either,
            but common to all towers.
    """
    found = []

    @tf.function(autograph=False)
    def step(piece, common):
        rows = Rows(
            tf.constant(0, tf.int64),
            tf.shape(piece, out_type=tf.int64)[0],
            tf.constant(8, tf.int64),
            tf.compat.v1.get_default_graph(),
        )
        common = tf.identity(common)
        rows.note_common(common)
        walk = Dimensions(rows)
        made = make(rows.mark(piece), tf.shape(common)[0])
        if made.dtype == tf.int32 and made.shape.rank == 0:
            found.append(walk.of_scalar(made))
        elif made.dtype == tf.int32:
            found.extend(walk.of_shape(made))
        else:
            found.extend(walk.of(made, axis) for axis in range(3))

    length = tf.TensorSpec([None], tf.float32)
    step.get_concrete_function(tf.TensorSpec([4, LENGTH, WIDTH]), length)
    return found


def _product(x, places):
    return tf.reduce_prod(tf.gather(tf.shape(x), places))


NUMBERS = {
    "product of static dimensions": (
        lambda x, n: _product(x, [1, 2]),
        LENGTH * WIDTH,
    ),
    "product of none": (lambda x, n: _product(x, tf.zeros([0], tf.int32)), 1),
    "product with a common one": (
        lambda x, n: tf.reduce_prod(tf.stack([n, WIDTH])),
        SAME,
    ),
    # Which of them come one after another is not in their number.
    "product with the examples": (lambda x, n: _product(x, [0, 1]), None),
    "an element": (lambda x, n: tf.gather(tf.shape(x), 0), ROWS),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    make, wanted = NUMBERS[name]
    assert explained(make) == [wanted]


def _unknown_places(x, n):
    places = tf.stack([n, n])
    return tf.gather(tf.shape(x), tf.ensure_shape(places, [2]))


VECTORS = {
    "elements": (
        lambda x, n: tf.gather(tf.shape(x), [2, 0]),
        [WIDTH, ROWS],
    ),
    "elements of elements": (
        lambda x, n: tf.gather(tf.gather(tf.shape(x), [2, 0, 1]), [1, 2]),
        [ROWS, LENGTH],
    ),
    "elements by places of the graph": (_unknown_places, [None, None]),
    "joined": (
        lambda x, n: tf.concat([tf.gather(tf.shape(x), [0]), [n]], 0),
        [ROWS, SAME],
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name):
    make, wanted = VECTORS[name]
    assert explained(make) == wanted


def _folded(x, n):
    """As ``tf.tensordot`` makes a matrix, and of that what it had been."""
    inner = _product(x, [2])
    matrix = tf.reshape(x, tf.stack([_product(x, [0, 1]), inner]))
    shape = tf.concat([tf.gather(tf.shape(x), [0, 1]), [inner]], 0)
    return tf.reshape(matrix + 1, shape)


ARRAYS = {
    "reshaped there and back": (_folded, [ROWS, LENGTH, WIDTH]),
    "blocks of one length": (
        lambda x, n: tf.reshape(x, tf.stack([-1, 1, _product(x, [2])])),
        [(LENGTH,), 1, WIDTH],
    ),
    "halves of examples are no rows": (
        lambda x, n: tf.reshape(
            x, tf.stack([-1, 2, tf.reduce_prod(tf.shape(x)[1:])])
        ),
        [None, 2, LENGTH * WIDTH],
    ),
    "of a length that is not static": (
        lambda x, n: tf.reshape(x, tf.stack([-1, n, 1])),
        [None, SAME, 1],
    ),
    "what is left for each example": (
        lambda x, n: tf.reshape(x, [tf.shape(x)[0], -1, 1]),
        [ROWS, LENGTH * WIDTH, 1],
    ),
    "what is left of the examples": (
        lambda x, n: tf.reshape(x, tf.stack([LENGTH, WIDTH, -1])),
        [LENGTH, WIDTH, None],
    ),
    "tensordot": (
        lambda x, n: tf.tensordot(x, tf.ones([WIDTH, 2]), 1),
        [ROWS, LENGTH, 2],
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name):
    make, wanted = ARRAYS[name]
    assert explained(make) == wanted


@pytest.mark.parametrize("length", [LENGTH, None])
def test_of_many_layers(length):
    """Each shape is made of several that led to the one before it."""

    def make(x, n):
        x = tf.compat.v1.placeholder_with_default(x, [None, length, WIDTH])
        for _ in range(24):
            x = tf.tensordot(x, tf.ones([WIDTH, WIDTH]), 1)
        return x

    assert explained(make) == [ROWS, LENGTH, WIDTH]
