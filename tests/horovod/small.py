"""What the checks of two ranks share."""

import keras
import numpy as np
import tensorflow as tf

import keras_towers.horovod as hvd

GLOBAL_BATCH = 16
BATCHES = 4
ROUNDING = 1e-6


def data(kind="dense", batches=BATCHES):
    rng = np.random.default_rng(7)
    number = GLOBAL_BATCH * batches
    y = rng.integers(0, 3, number)
    if kind == "words":
        return rng.integers(0, 20, (number, 5)), y
    return rng.normal(size=(number, 6)).astype("float32"), y


def mine(array):
    """This rank's half of every global batch."""
    parts = array.reshape(-1, 2, GLOBAL_BATCH // 2, *array.shape[1:])
    return parts[:, hvd.rank()].reshape(-1, *array.shape[1:])


def first_batch():
    """This rank's half of the first global batch, as tensors."""
    return [tf.constant(mine(array)[: GLOBAL_BATCH // 2]) for array in data()]


def model(kind="dense", seed=3):
    """A small model, built, with the same weights wherever it is made."""
    keras.utils.set_random_seed(seed)
    first = [keras.Input((6,))]
    if kind == "words":
        first = [
            keras.Input((5,), dtype="int64"),
            keras.layers.Embedding(20, 4),
            keras.layers.Flatten(),
        ]
    return keras.Sequential(
        [
            *first,
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(rate=0.1, **kwargs):
    return keras.optimizers.SGD(rate, momentum=0.9, **kwargs)


def train(optimizer, kind="dense", alone=False, made=None, epochs=1, **kwargs):
    """Fit a model on this rank's half, or alone on the global batches.

    In eager mode where it is alone: the reference need not be traced.
    """
    made = made or model(kind)
    made.compile(optimizer, loss(), **{"run_eagerly": alone, **kwargs})
    x, y = data(kind)
    if not alone:
        x, y = mine(x), mine(y)
    size = GLOBAL_BATCH if alone else GLOBAL_BATCH // 2
    made.fit(x, y, size, epochs=epochs, shuffle=False, verbose=0)
    return made


def _largest(some, others):
    pairs = zip(some, others, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def apart(some, others):
    """How far the values of variables are from one another."""
    return _largest(*([v.numpy() for v in each] for each in (some, others)))


def ranks_apart(variables):
    """How far the ranks' values of variables are from one another."""
    return _largest(*hvd.allgather_object([v.numpy() for v in variables]))


def assert_as_alone(ours, alone, tolerance=ROUNDING):
    """Weights are those of one process, on all ranks."""
    assert apart(ours.weights, alone.weights) < tolerance
    assert ranks_apart(ours.weights) == 0
    if ours.optimizer is not None:
        iterations = int(alone.optimizer.iterations)
        assert int(ours.optimizer.iterations) == iterations > 0


def gradients(made, x, y):
    with tf.GradientTape() as tape:
        value = loss()(y, made(x, training=True))
    return tape.gradient(value, made.trainable_variables)
