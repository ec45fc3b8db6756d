"""What is exchanged, so that an operation gets the layouts that it needs."""

import tensorflow as tf

from keras_towers.partition.ir.layouts import InShards
from tests.partition import tensor_lists as lists
from tests.partition.kit import (
    exchange_counts,
    laid_out,
    partial_sum,
    replicated,
    sharded,
)
from tests.partition.layout.rules.cases.case import axis_size
from tests.partition.layout_list import as_listed

X, W, TOTAL = sharded(-1, 4), replicated(4), partial_sum(4)
COLUMNS = sharded(4, -1)
BLOCKS = sharded(2, -1, 3, blocks=3, rows=2)
TEXTS = sharded(-1, 3, 4, hidden=(1,))


def _once(x):
    """Something that is computed once, of all rows."""
    return tf.sort(x, 0)


def _elements(x):
    """A list of the columns of rows."""
    return tf.raw_ops.TensorListFromTensor(
        tensor=tf.transpose(x), element_shape=tf.constant(-1)
    )


# The exchanges of the results themselves are among them.
CONVERSIONS = {
    "rows to a whole": lambda x: tf.unique(x[:, 0])[0],
    "columns to a whole": lambda columns: tf.unique(columns[0])[0],
    "blocks to a whole": lambda blocks: tf.reverse(blocks, [1]),
    "rows of texts to a whole": lambda texts: tf.reverse(texts, [0]),
    "a sum to a whole": (tf.square, TOTAL),
    "a sum to a whole for rows": lambda total, x: x * tf.exp(total),
    "the largest of all rows": lambda x: tf.reduce_max(x, 0),
    "a whole to a term of a sum": lambda total, w: total + w,
    "a whole back to rows": lambda x: 2 * _once(x),
    "a whole back to blocks": lambda blocks: tf.reverse(blocks, [1]) * blocks,
    "one gather for all users": lambda x: (
        tf.unique(x[:, 0])[0],
        tf.unique(-x[:, 0])[0],
    ),
    "one gather of the same rows": lambda x: (_once(x), tf.reverse(x, [0])),
    "one sum for all users": lambda total: (tf.exp(total), tf.sin(total)),
    "the sum in place of what follows": lambda total: (tf.exp(total), -total),
    "what follows of a larger sum": lambda total: (
        tf.exp(total),
        tf.reduce_sum(total),
    ),
    "a list of elements with rows": lambda x: lists.stack(
        lists.push(lists.empty(tf.shape(x)), x), -1
    ),
    "a list to a whole": lambda x: tf.raw_ops.TensorListGather(
        input_handle=_elements(x),
        indices=tf.unique(tf.cast(x[:1, 0] * 0, tf.int32))[0],
        element_shape=tf.constant(-1),
        element_dtype=tf.float32,
    ),
    "sizes on all towers": lambda texts: tf.fill(
        [axis_size(texts), axis_size(texts, 1)], 1.0
    ),
    "a size that follows from towers": lambda texts: axis_size(texts[:, 1:], 1),
}


test_conversions = as_listed(
    "conversions: conversions", CONVERSIONS, exchanges=True
)


def test_rows_of_any_number_of_values_are_computed():
    def function(x):
        return tf.add_n([x, *(tf.fill([6, 4], float(k)) for k in range(70))])

    program = laid_out(function, sharded(-1, 4, examples=6))
    types = [operation.type for operation in program.operations]
    assert types.count("Fill") == 70 and "Slice" not in types


def test_a_gradient_is_scattered_to_rows_of_a_variable():
    def function(x):
        gradient = tf.matmul(x, x, transpose_a=True)
        return tf.raw_ops.IdentityN(input=[gradient], name="handed")

    handed = {"handed": [InShards(0, 4)]}
    program = laid_out(function, X, handed=handed)
    assert exchange_counts(program) == {"scatter": 1, "gather": 1}
