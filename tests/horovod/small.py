"""What the checks of two ranks share."""

import functools

import keras
import numpy as np
import tensorflow as tf

import keras_towers.horovod as hvd

GLOBAL_BATCH = 16
BATCHES = 6
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


def model(kind="dense", seed=3, **kwargs):
    """A small model, built, with the same weights wherever it is made."""
    keras.utils.set_random_seed(seed)
    first = (
        [
            keras.Input((5,), dtype="int64"),
            keras.layers.Embedding(20, 4),
            keras.layers.Flatten(),
        ]
        if kind == "words"
        else [keras.Input((6,))]
    )
    return keras.Sequential(
        [
            *first,
            keras.layers.Dense(8, activation="tanh", **kwargs),
            keras.layers.Dense(3, **kwargs),
        ]
    )


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(optimizer, kind="dense", alone=False, made=None, epochs=2, **kwargs):
    """Fit a model on this rank's half, or alone on the global batches."""
    made = made or model(kind)
    made.compile(optimizer, loss(), **kwargs)
    x, y = data(kind)
    if not alone:
        x, y = mine(x), mine(y)
    size = GLOBAL_BATCH if alone else GLOBAL_BATCH // 2
    made.fit(x, y, size, epochs=epochs, shuffle=False, verbose=0)
    return made


@functools.cache
def trained_alone(make, kind="dense"):
    """What one process gets; shared by checks, so not to be trained on."""
    return train(make(), kind, alone=True)


def weights_apart(one, other):
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def ranks_apart(made):
    """How far the ranks' weights are from one another."""
    everyone = hvd.allgather_object(made.get_weights())
    pairs = zip(*everyone, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def assert_trains_as_alone(
    make, kind="dense", reference=None, iterations=12, **options
):
    """Train distributed, and alone on one rank, and compare the weights."""
    alone = None
    if hvd.rank() == 0:
        alone = trained_alone(reference or make, kind)
    ours = train(hvd.DistributedOptimizer(make(), **options), kind)
    assert_as_alone(ours, alone, kind, iterations)


def assert_as_alone(ours, alone, kind="dense", iterations=12):
    """Weights are those of one process, on all ranks, and have moved."""
    assert alone is None or weights_apart(ours, alone) < ROUNDING
    assert ranks_apart(ours) == 0
    assert weights_apart(ours, model(kind)) > 1e-3
    assert int(ours.optimizer.iterations) == iterations


def sgd(rate=0.1, **kwargs):
    return keras.optimizers.SGD(rate, momentum=0.9, **kwargs)


def gradients(made, x, y):
    with tf.GradientTape() as tape:
        value = loss()(y, made(x, training=True))
    return tape.gradient(value, made.trainable_variables)
