"""A small model, its data, and what is asserted of it on every rank."""

import contextlib
import functools
import logging
import os
import resource
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.foundation import system
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.leaving import Boom
from tests.kit.ranks import rank_here

RANK = rank_here()
# What the ranks train with: the same checks run over every transport.
Strategy = getattr(kt, os.environ.get("TESTED_STRATEGY", "HorovodStrategy"))
COUNT, SHORT = 50, 21
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(COUNT, 4)).astype("float32")
Y = GENERATOR.normal(size=(COUNT, 3)).astype("float32")
SPEC = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 3)))


def model(
    *more, outputs=3, seed=0, before=0, optimizer="sgd", loss="mse", **options
):
    """A compiled model, with more layers at its end.

    Layers made before it count in the names of its own.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    for _ in range(before):
        keras.layers.Dense(1)
    built = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dense(outputs),
            *more,
        ]
    )
    built.compile(optimizer, loss, **{"metrics": ["mae"], **options})
    return built


def eager(*more, **options):
    """Likewise, where steps are not what is tested: tracing takes long."""
    return model(*more, run_eagerly=True, **options)


def fit(mine, x=X, y=Y, **options):
    """``fit`` in order."""
    return mine.fit(x, y, **{"shuffle": False, "verbose": 0, **options})


def forget_seed():
    """As in a script that never sets one; there is no public way back."""
    from tensorflow.python.eager import context

    context.context()._seed = None


def gather(value):
    return Strategy()._config.job.gather_objects(value)


def exchange_without_memory(over, collective, *_):
    """Exchange more than rank 1 has memory for."""
    rows = tf.zeros([over.size, 2**23])
    exchange = functools.partial(getattr(over, collective), rows, "large")
    if over.name == "Horovod":
        exchange = tf.function(functools.partial(_beside_late, over, exchange))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if RANK == 1:
        most = system.resident_bytes("VmData") + 2**24
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        exchange()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _beside_late(over, exchange):
    """Exchange something small, to which rank 0 comes late, at the same time.

    Rank 1 has begun it when its memory ends, and cannot give it up.
    """

    def late(value):
        time.sleep(2 * (RANK == 0))
        return value

    small = tf.numpy_function(late, [tf.ones([3])], tf.float32, False)
    small = over.all_reduce([tf.ensure_shape(small, [3])], "small")
    return small, exchange()


def assert_equal_on_ranks(value):
    first, *others = gather(value)
    assert all(other == first for other in others), [first, *others]


def assert_same_model(one, other=None):
    """Weights are equal on all ranks, and on rank 0 those of the other model.

    Only rank 0 needs to have trained the other one.
    """
    assert_equal_on_ranks([w.tobytes() for w in one.get_weights()])
    if other is not None and RANK == 0:
        assert_all_close(one.get_weights(), other.get_weights())


def assert_as_one_process(
    mine, act=fit, alone=None, reference=None, strategy=None, tolerance=2e-6
):
    """Use a model on the ranks, and compare with one process.

    Args:
        mine: the model.
        act: uses it, and returns arrays, or its ``History``.
        alone: the model of one process; on rank 0, which compares.
        reference: uses that one; like ``act`` where it is None.
        strategy: of the ranks.
        tolerance: the largest difference of what is returned; None: ranks may
            return what they have seen for themselves.
    """
    with strategy or Strategy():
        found = act(mine)
    if RANK == 0:
        alone = alone or eager()
        wanted = (reference or act)(alone)
    assert_same_model(mine, alone)
    if tolerance is None:
        return
    found = _values(found)
    assert_equal_on_ranks([value.tobytes() for value in tf.nest.flatten(found)])
    if RANK == 0:
        tf.nest.map_structure(
            lambda a, b: assert_close(a, b, tolerance), found, _values(wanted)
        )


def _values(returned):
    """Arrays in place of numbers, and of a ``History``."""
    returned = getattr(returned, "history", returned)
    return tf.nest.map_structure(np.asarray, returned)


def own_step(strategy, mine):
    """A step of a loop of one's own, on a global batch of 25."""

    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((mine(x) - y) ** 2) / 25.0
        weights = mine.trainable_variables
        mine.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function
    def step(batch):
        losses = strategy.run(replica, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    return step


@contextlib.contextmanager
def refused(*words):
    """What is done in the block is an error that says all of the words."""
    with pytest.raises(kt.TowerError) as error:
        yield
    for word in words:
        assert word in str(error.value), (word, str(error.value))


class Messages(logging.Handler):
    """What the package logs in a block."""

    def __enter__(self):
        self.texts = []
        logging.getLogger("keras_towers").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("keras_towers").removeHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())

    def have(self, words):
        return any(words in text for text in self.texts)


class Does(keras.callbacks.Callback):
    """Does something with the model at events."""

    def __init__(self, **events):
        super().__init__()
        for event, does in events.items():
            setattr(self, event, lambda *a, does=does, **k: does(self.model))


def breaks_behind(number):
    """A callback that ends training behind so many batches."""
    batches = []

    def count(model):
        batches.append(0)
        if len(batches) == number:
            raise Boom

    return Does(on_train_batch_end=count)
