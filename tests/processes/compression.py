"""Checks of a worker: how gradients travel between two ranks."""

import functools
import pathlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from keras_towers.reduction import shared_memory
from tests.kit.ranks import check
from tests.processes.small import RANK, Strategy, gather, refused

GENERATOR = np.random.default_rng(0)
COUNT = 25
X = GENERATOR.normal(size=(COUNT, 96)).astype("float32")
Y = GENERATOR.normal(size=(COUNT, 4)).astype("float32")
IDS = GENERATOR.integers(50, size=(COUNT, 3))
# Both layers together are more than what small messages may have.
WIDTH = 900


def train(compression):
    """Weights after training: those of this rank, equal to the other's."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((96,)),
            keras.layers.Dense(WIDTH, "tanh"),
            keras.layers.Dense(4),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(optimizer, "mse", run_eagerly=True)
    with Strategy(compression=compression):
        history = model.fit(X, Y, 10, verbose=0, shuffle=False)
    weights = model.get_weights()
    first, other = gather([w.tobytes() for w in weights] + [history.history])
    assert first == other, "the ranks differ"
    return weights


@functools.cache
def exactly():
    """Weights after training with gradients that are sent as they are."""
    return train("none")


def difference(first, second):
    return max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))


@check
def shared_memory_is_exact_to_the_bit():
    before = set(shared_memory.FOLDER.iterdir())
    calls = []
    collect = shared_memory.SharedBucket.collect

    def counted(bucket, ranks):
        calls.append(ranks)
        return collect(bucket, ranks)

    with mock.patch.object(shared_memory.SharedBucket, "collect", counted):
        assert difference(train(None), exactly()) == 0
    assert len(calls) == 3
    left = set(shared_memory.FOLDER.iterdir()) - before
    assert not [p for p in left if p.name.startswith("keras-towers")]


@check
def a_rank_without_shared_memory():
    missing = pathlib.Path("/dev/shm/missing")
    folder = missing if RANK == 1 else shared_memory.FOLDER
    with mock.patch.object(shared_memory, "FOLDER", folder):
        assert difference(train(None), exactly()) == 0


@check
def forms_are_near_the_exact_sum():
    for name in ("fp16", "fp16-shards"):
        distance = difference(train(name), exactly())
        assert 0 < distance < 1e-3, (name, distance)
    # The wide layer as two factors of rank 4.
    assert 1e-3 < difference(train("power-sgd"), exactly()) < 0.1
    described = Strategy(compression="power-sgd").describe()
    assert 'compression "power-sgd" changes results' in described
    assert "changes results" not in Strategy().describe()


@check
def sparse_gradients_and_metrics_stay_exact():
    def run(compression):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Embedding(50, 8),
                keras.layers.Flatten(),
            ]
        )
        model.compile("sgd", "mse", run_eagerly=True)
        with Strategy(compression=compression):
            history = model.fit(
                *(IDS, np.ones((COUNT, 24)), 10), verbose=0, shuffle=False
            )
        return model.get_weights(), history.history

    assert str(run("bf16")) == str(run("none"))


@check
def what_cannot_be():
    for compression in ("zip", 3):
        with refused("bf16-feedback"):
            Strategy(compression=compression)
    strategy = Strategy(compression="fp16")
    with strategy.scope():
        # The sum of the ranks is one that float16 cannot hold.
        total = strategy.reduce("SUM", tf.constant(1e6 + RANK), axis=None)
    assert float(total) == 2e6 + 1
