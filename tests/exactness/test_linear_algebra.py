"""Decompositions of examples' matrices that XLA compiles, and their gradients.

An attribute such as ``compute_uv`` may empty outputs. Without XLA, they are
among the operations of ``tests/partition/layout/rules``.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_exact
from tests.kit.sampling import long_unless

pytestmark = pytest.mark.alternate

_TOWERS = 3
_X = np.random.default_rng(0).normal(size=(14, 64)).astype("float32")
linalg, ops = tf.linalg, keras.ops


def _symmetric(x):
    return x + linalg.matrix_transpose(x)


def _positive(x):
    return linalg.matmul(x, x, transpose_b=True) + tf.eye(4)


def _invertible(x):
    return x * 0.3 + 3.0 * tf.eye(4)


def _tall(x):
    return x[..., :3]


def _of_values(values, vectors):
    """Something of vectors that does not depend on their signs."""
    return tf.concat([values, tf.reduce_sum(vectors**4, -2)], -1)


def _svd(x, full):
    s, u, v = linalg.svd(x, full_matrices=full)
    return tf.concat([s, tf.reduce_sum(u**4, -1), tf.reduce_sum(v**4, -1)], -1)


COMPILED = {
    "svd without vectors": lambda x: linalg.svd(x, compute_uv=False),
    "svd": functools.partial(_svd, full=False),
    "nuclear norm": lambda x: ops.norm(x, "nuc", (-2, -1))[:, None],
    "spectral norm": lambda x: ops.norm(x, 2, (-2, -1))[:, None],
    "eigh without vectors": lambda x: linalg.eigvalsh(_symmetric(x)),
    "eigh": lambda x: _of_values(*linalg.eigh(_symmetric(x))),
    "qr": lambda x: linalg.qr(_tall(x))[1],
    "inverse": lambda x: linalg.inv(_invertible(x)),
    "adjoint inverse": lambda x: linalg.inv(_invertible(x), adjoint=True),
    "cholesky": lambda x: linalg.cholesky(_positive(x)),
    "solve": lambda x: linalg.solve(_invertible(x), _tall(x)),
    "adjoint solve": lambda x: linalg.solve(
        _invertible(x), _tall(x), adjoint=True
    ),
    "triangular": lambda x: linalg.triangular_solve(
        _invertible(x), x, lower=False, adjoint=True
    ),
}


class Decomposed(keras.layers.Layer):
    """All results for the matrices of an example, in one row."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def call(self, inputs):
        matrices = tf.reshape(inputs, (-1, 4, 4))
        found = [function(matrices) for function in self.functions.values()]
        rows = [tf.reshape(y, (-1, np.prod(y.shape[1:]))) for y in found]
        return tf.tanh(tf.concat(rows, 1))


def _make(functions, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16), Decomposed(functions)]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


def _fit(count, model):
    """Fit batches of four.

    The trace knows their size if all are full. In the last of 14 examples, one
    tower has none.
    """
    x, y = _X[:count], _X[:count, :2]
    return model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


# The compilations of the others take long.
_EMPTIED = [name for name in COMPILED if "without" in name]


@pytest.mark.parametrize(
    ("count", "names"),
    long_unless(
        lambda case: case == (12, _EMPTIED),
        [(n, names) for n in (12, 14) for names in (_EMPTIED, [*COMPILED])],
    ),
)
def test_decompositions(count, names):
    functions = {name: COMPILED[name] for name in names}
    make = functools.partial(_make, functions, jit_compile=True)
    strategy = kt.TowerStrategy(_TOWERS, updates="each")
    act = functools.partial(_fit, count)
    assert_exact(make, act, strategy, tolerance=2e-5, in_graph=True)
