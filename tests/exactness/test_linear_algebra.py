"""Decompositions, their gradients, and what attributes change about them.

The examples of a model are matrices. An attribute such as ``compute_uv`` may
empty outputs or give them other shapes.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_exact
from tests.kit.sampling import long_unless, sample_of

pytestmark = pytest.mark.alternate

_TOWERS = 3
_SHARDED = {"weights": "sharded"}
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


def _banded(x):
    return tf.stack([x[:, 0], 4.0 + x[:, 1], x[:, 2]], 1)


def _of_values(values, vectors):
    """Something of vectors that does not depend on their signs."""
    return tf.concat([values, tf.reduce_sum(vectors**4, -2)], -1)


def _svd(x, full):
    s, u, v = linalg.svd(x, full_matrices=full)
    return tf.concat([s, tf.reduce_sum(u**4, -1), tf.reduce_sum(v**4, -1)], -1)


# What XLA compiles, of the examples' matrices.
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
ALL = {
    **COMPILED,
    "keras svd without vectors": lambda x: ops.svd(x, compute_uv=False),
    "keras eigh": lambda x: _of_values(*ops.eigh(_symmetric(x))),
    "svd of full matrices": functools.partial(_svd, full=True),
    "eig without vectors": lambda x: tf.abs(linalg.eigvals(x)),
    "eig": lambda x: tf.abs(linalg.eig(x)[0]),
    "full qr": lambda x: tf.stop_gradient(
        linalg.qr(_tall(x), full_matrices=True)[1]
    ),
    "lu": lambda x: tf.stop_gradient(linalg.lu(_invertible(x))[0]),
    "determinant": lambda x: linalg.slogdet(_positive(x))[1][:, None],
    "least squares": lambda x: linalg.lstsq(_tall(x), x, 0.1),
    "slow least squares": lambda x: tf.stop_gradient(
        linalg.lstsq(_tall(x), x, 0.1, fast=False)
    ),
    "keras least squares": lambda x: tf.stop_gradient(
        tf.map_fn(lambda one: ops.lstsq(one[:, :3], one), x)
    ),
    "pseudo-inverse": lambda x: ops.pinv(x),
    "rank": lambda x: tf.cast(linalg.matrix_rank(x), "float32")[:, None],
    "root": lambda x: tf.stop_gradient(linalg.sqrtm(_positive(x))),
    "exponential": lambda x: linalg.expm(x * 0.1),
    "tridiagonal": lambda x: linalg.tridiagonal_solve(
        _banded(x), x, diagonals_format="compact"
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


@pytest.mark.parametrize(
    ("count", "options"),
    [(12, {}), *sample_of([(14, {}), *((n, _SHARDED) for n in (12, 14))], 3)],
)
def test_decompositions(count, options):
    strategy = kt.TowerStrategy(_TOWERS, **options)
    make = functools.partial(_make, ALL, jit_compile=False)
    assert_exact(make, functools.partial(_fit, count), strategy, tolerance=2e-5)


# Their other compilations take long.
_EMPTIED = [name for name in COMPILED if "without" in name]


@pytest.mark.parametrize(
    ("count", "names"),
    long_unless(
        lambda case: case == (12, _EMPTIED),
        [(n, names) for n in (12, 14) for names in (_EMPTIED, [*COMPILED])],
    ),
)
def test_compiled_decompositions(count, names):
    functions = {name: COMPILED[name] for name in names}
    make = functools.partial(_make, functions, jit_compile=True)
    strategy = kt.TowerStrategy(_TOWERS, updates="each")
    act = functools.partial(_fit, count)
    assert_exact(make, act, strategy, tolerance=2e-5, in_graph=True)
