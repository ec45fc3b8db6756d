"""Models and comparisons for the checks of two ranks."""

import numpy as np
import tensorflow as tf

from keras_towers import horovod as hvd
from keras_towers.inspection.conformance import case_models as m

GLOBAL_BATCH = 16
ROUNDING = 1e-6
# Data, and what makes a model of them, built, with the same weights everywhere.
DENSE = m.FEATURES, m.mlp
WORDS = m.TOKENS, m.with_embedding


def mine(array):
    """This rank's half of every global batch."""
    parts = array.reshape(-1, 2, GLOBAL_BATCH // 2, *array.shape[1:])
    return parts[:, hvd.rank()].reshape(-1, *array.shape[1:])


def first_batch():
    """This rank's half of the first global batch, as tensors."""
    return [
        tf.constant(mine(array)[: GLOBAL_BATCH // 2])
        for array in (m.FEATURES, m.LABELS)
    ]


def train(optimizer, kind=DENSE, alone=False, made=None, epochs=1, **kwargs):
    """Fit a model on this rank's half, or alone on the global batches.

    In eager mode where it is alone: the reference need not be traced.
    """
    x, build = kind
    made = made or build()
    made.compile(
        optimizer, m.cross_entropy(), **{"run_eagerly": alone, **kwargs}
    )
    x, y = (x, m.LABELS) if alone else (mine(x), mine(m.LABELS))
    size = GLOBAL_BATCH if alone else GLOBAL_BATCH // 2
    made.fit(x, y, size, epochs=epochs, shuffle=False, verbose=0)
    return made


def _largest_difference(some, others):
    pairs = zip(some, others, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def difference(some, others):
    """The largest difference between the values of variables."""
    return _largest_difference(
        *([v.numpy() for v in each] for each in (some, others))
    )


def difference_between_ranks(variables):
    """The largest difference between the ranks' values of variables."""
    return _largest_difference(
        *hvd.allgather_object([v.numpy() for v in variables])
    )


def assert_as_alone(ours, alone, tolerance=ROUNDING):
    """Assert that all ranks have the weights of one process."""
    assert difference(ours.weights, alone.weights) < tolerance
    assert difference_between_ranks(ours.weights) == 0
    if ours.optimizer is not None:
        iterations = int(alone.optimizer.iterations)
        assert int(ours.optimizer.iterations) == iterations > 0


def gradients(made, x, y):
    with tf.GradientTape() as tape:
        value = m.cross_entropy()(y, made(x, training=True))
    return tape.gradient(value, made.trainable_variables)
