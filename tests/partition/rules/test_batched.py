"""How towers have products, images, diagonals, and other items of a batch."""

import tensorflow as tf

from tests.partition.kit import (
    check_described,
    each,
    partial_sum,
    replicated,
    sharded,
)
from tests.partition.rules.cases.case import axis_size

X, W, TOTAL = sharded(-1, 4), replicated(4, 3), partial_sum(5, 4)
COLUMNS = sharded(4, -1)
MATRICES = sharded(-1, 3, 3)

PRODUCTS = {
    "MatMul of all pairs": (
        "rows 0 of [n, n]",
        lambda x: tf.matmul(x, x, transpose_b=True),
        X,
    ),
    "MatMul over rows and columns": ("sum of [4, 4]", tf.matmul, COLUMNS, X),
    "MatMul of a sum": (
        "sum of [5, 3]",
        lambda t: t @ tf.ones([4, 3]),
        TOTAL,
    ),
    "MatMul by a sum": (
        "sum of [2, 4]",
        lambda t: tf.ones([2, 5]) @ t,
        TOTAL,
    ),
    "BatchMatMulV2 over rows": (
        "sum of [2, 3, 3]",
        tf.matmul,
        sharded(2, 3, -1),
        sharded(2, -1, 3),
    ),
    "Einsum of words": (
        "rows 2 of [3, 2, n]",
        lambda x, w: tf.einsum("n...a,ab->b...n", x, w),
        sharded(-1, 2, 4),
        W,
    ),
    "Einsum over rows of one factor": (
        "whole [3]: Einsum",
        lambda x, w: tf.einsum("na,ab->b", x, w),
        X,
        W,
    ),
    "Einsum of a diagonal": (
        "whole [?, 3]: Einsum",
        lambda x: tf.einsum("naa->na", x),
        MATRICES,
    ),
    "Einsum of a sum": (
        "sum of [5]",
        lambda t: tf.einsum("ab,b->a", t, tf.ones(4)),
        TOTAL,
    ),
}


@each(PRODUCTS)
def test_products(case):
    check_described(*case)


IMAGES = sharded(-1, 4, 4, 2)
KERNEL = replicated(3, 3, 2, 5)


def _conv(x, w):
    return tf.nn.conv2d(x, w, 1, "SAME")


def _input_gradient(x, w):
    return tf.gradients(_conv(x, w), x)


SOME_IMAGES = sharded(-1, 4, 4, 2, hidden=(1, 2))
BATCHED = {
    "Conv2D of any size": (
        "rows 0 of [n, 0.1, 0.2, 5]",
        _conv,
        SOME_IMAGES,
        KERNEL,
    ),
    "Conv2D with strides": (
        "rows 0 of [n, ?, ?, 5]",
        lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"),
        SOME_IMAGES,
        KERNEL,
    ),
    "Conv2DBackpropInput of any size": (
        "rows 0 of [n, 0.1, 0.2, 2]",
        _input_gradient,
        SOME_IMAGES,
        KERNEL,
    ),
    "MaxPool": (
        "rows 0 of [n, 0.1, 0.2, 2]",
        lambda x: tf.nn.max_pool2d(x, 2, 1, "SAME"),
        SOME_IMAGES,
    ),
    "SpaceToBatchND": (
        "rows 0 of [4*n, 2, 2, 2] in 4 blocks",
        lambda x: tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]),
        IMAGES,
    ),
    "BatchToSpaceND": (
        "rows 0 of [n, 4, 4, 2]",
        lambda x: tf.batch_to_space(
            tf.space_to_batch(x, [2, 1], [[0, 0], [0, 0]]),
            [2, 1],
            [[0, 0], [0, 0]],
        ),
        IMAGES,
    ),
    "BatchToSpaceND of other blocks": (
        "whole [?, 8, 4, 2]: BatchToSpaceND",
        lambda x: tf.batch_to_space(x, [2, 1], [[0, 0], [0, 0]]),
        sharded(-1, 4, 4, 2, blocks=3, rows=2),
    ),
}


@each(BATCHED)
def test_each_item_of_a_batch(case):
    check_described(*case)


def _pairs(x):
    return tf.matmul(x, x, transpose_b=True)


DIAGONALS = {
    "MatrixDiagPartV3 of pairs": (
        "rows 0 of [n]",
        lambda x: tf.linalg.diag_part(_pairs(x)),
        X,
    ),
    "MatrixDiagPartV3 above the main one": (
        "whole [4]: MatrixDiagPartV3",
        lambda x: tf.linalg.diag_part(_pairs(x), k=1),
        sharded(-1, 4, examples=5),
    ),
    "MatrixSetDiagV3 of pairs": (
        "rows 0 of [n, n]",
        lambda x: tf.linalg.set_diag(_pairs(x), x[:, 0]),
        X,
    ),
    "MatrixDiagV3 of rows": ("rows 0 of [n, n]", tf.linalg.diag, sharded(-1)),
    "eye of examples": (
        "rows 0 of [n, n]",
        lambda x: _pairs(x) - tf.eye(axis_size(x)),
        X,
    ),
}


@each(DIAGONALS)
def test_diagonals(case):
    check_described(*case)
