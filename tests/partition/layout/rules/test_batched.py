"""How towers have products, images, diagonals, and other items of a batch."""

import tensorflow as tf

from tests.partition.kit import partial_sum, replicated, sharded
from tests.partition.layout.rules.cases.case import axis_size
from tests.partition.layout_list import as_listed

X, W, TOTAL = sharded(-1, 4), replicated(4, 3), partial_sum(5, 4)
COLUMNS = sharded(4, -1)
MATRICES = sharded(-1, 3, 3)

PRODUCTS = {
    "MatMul of all pairs": lambda x: tf.matmul(x, x, transpose_b=True),
    "MatMul over rows and columns": (tf.matmul, COLUMNS, X),
    "MatMul of a sum": lambda total: total @ tf.ones([4, 3]),
    "MatMul by a sum": lambda total: tf.ones([2, 5]) @ total,
    "BatchMatMulV2 over rows": (
        tf.matmul,
        sharded(2, 3, -1),
        sharded(2, -1, 3),
    ),
    "Einsum of words": (
        lambda x, w: tf.einsum("n...a,ab->b...n", x, w),
        sharded(-1, 2, 4),
        W,
    ),
    "Einsum over rows of one factor": lambda x, w: tf.einsum("na,ab->b", x, w),
    "Einsum of a diagonal": lambda matrices: tf.einsum("naa->na", matrices),
    "Einsum of a sum": lambda total: tf.einsum("ab,b->a", total, tf.ones(4)),
}


test_products = as_listed("batched: products", PRODUCTS)


IMAGES = sharded(-1, 4, 4, 2)
KERNEL = replicated(3, 3, 2, 5)


def _conv(x, w):
    return tf.nn.conv2d(x, w, 1, "SAME")


def _input_gradient(x, w):
    return tf.gradients(_conv(x, w), x)


SOME_IMAGES = sharded(-1, 4, 4, 2, hidden=(1, 2))
BATCHED = {
    "Conv2D of any size": (_conv, SOME_IMAGES, KERNEL),
    "Conv2D with strides": lambda some_images, kernel: tf.nn.conv2d(
        some_images, kernel, 2, "SAME"
    ),
    "Conv2DBackpropInput of any size": (_input_gradient, SOME_IMAGES, KERNEL),
    "MaxPool": lambda some_images: tf.nn.max_pool2d(some_images, 2, 1, "SAME"),
    "SpaceToBatchND": lambda images: tf.space_to_batch(
        images, [2, 2], [[0, 0], [0, 0]]
    ),
    "BatchToSpaceND": lambda images: tf.batch_to_space(
        tf.space_to_batch(images, [2, 1], [[0, 0], [0, 0]]),
        [2, 1],
        [[0, 0], [0, 0]],
    ),
    "BatchToSpaceND of other blocks": (
        lambda x: tf.batch_to_space(x, [2, 1], [[0, 0], [0, 0]]),
        sharded(-1, 4, 4, 2, blocks=3, rows=2),
    ),
}


test_each_item_of_a_batch = as_listed("batched: batched", BATCHED)


def _pairs(x):
    return tf.matmul(x, x, transpose_b=True)


DIAGONALS = {
    "MatrixDiagPartV3 of pairs": lambda x: tf.linalg.diag_part(_pairs(x)),
    "MatrixDiagPartV3 above the main one": (
        lambda x: tf.linalg.diag_part(_pairs(x), k=1),
        sharded(-1, 4, examples=5),
    ),
    "MatrixSetDiagV3 of pairs": lambda x: tf.linalg.set_diag(
        _pairs(x), x[:, 0]
    ),
    "MatrixDiagV3 of rows": (tf.linalg.diag, sharded(-1)),
    "eye of examples": lambda x: _pairs(x) - tf.eye(axis_size(x)),
}


test_diagonals = as_listed("batched: diagonals", DIAGONALS)
