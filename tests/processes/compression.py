"""Checks of a worker: how gradients travel between two ranks."""

import functools
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers.reduction import segments
from tests.kit.ranks import check, rank_here
from tests.processes.small import Strategy

RANK = rank_here()
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(45, 96)).astype("float32")
Y = GENERATOR.normal(size=(45, 4)).astype("float32")
IDS = GENERATOR.integers(50, size=(45, 3))
# Both layers together are more than what small messages may have.
WIDTH = 900


def train(compression, optimizer=None, epochs=2, **options):
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
    # Gradients with values that 16 bits cannot hold.
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    strategy = Strategy(compression=compression)
    with strategy:
        history = model.fit(
            X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0
        )
    weights = model.get_weights()
    everywhere = strategy._config.transport.gather_objects(
        [w.tobytes() for w in weights] + [str(history.history)]
    )
    assert everywhere[0] == everywhere[1], "the ranks differ"
    return weights


@functools.cache
def exactly():
    """Weights after training with gradients that are sent as they are."""
    return train("none")


def difference(first, second):
    return max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))


@check
def shared_memory_is_exact_to_the_bit():
    before = set(segments.FOLDER.iterdir())
    assert difference(train(None), exactly()) == 0
    left = set(segments.FOLDER.iterdir()) - before
    assert not [p for p in left if p.name.startswith("keras-towers")]


@check
def shared_memory_is_in_use():
    calls = []
    collect = segments.SharedBucket.collect

    def counted(bucket, ranks):
        calls.append(ranks)
        return collect(bucket, ranks)

    segments.SharedBucket.collect = counted
    try:
        train(None, epochs=1)
    finally:
        segments.SharedBucket.collect = collect
    assert len(calls) == 5


@check
def a_rank_without_shared_memory():
    exact = exactly()
    folder = segments.FOLDER
    try:
        if RANK == 1:
            segments.FOLDER = pathlib.Path("/dev/shm/missing")
        assert difference(train(None), exact) == 0
    finally:
        segments.FOLDER = folder


@check
def forms_are_near_the_exact_sum():
    exact = exactly()
    for name, limit in {
        "fp16": 1e-3,
        "fp16-shards": 1e-3,
        "bf16": 1e-2,
        "fp16-feedback": 1e-3,
        "bf16-feedback": 1e-2,
    }.items():
        distance = difference(train(name), exact)
        assert 0 < distance < limit, (name, distance)


@check
def several_steps_at_once():
    for name in (None, "bf16-feedback"):
        one_by_one = train(name)
        assert difference(train(name, steps_per_execution=3), one_by_one) < 1e-6


@check
def overflow_is_seen_by_the_loss_scale():
    # Scaled by so much, float16 overflows where float32 does not.
    for name in ("fp16", "fp16-shards", "fp16-feedback"):
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**24
        )
        weights = train(name, optimizer)
        assert all(np.isfinite(w).all() for w in weights)
        assert float(optimizer.dynamic_scale) < 2.0**24
        assert 0 < int(optimizer.inner_optimizer.iterations) < 10


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
        model.compile("sgd", "mse")
        with Strategy(compression=compression):
            history = model.fit(
                IDS, np.ones((45, 24)), 10, verbose=0, shuffle=False
            )
        return model.get_weights(), history.history

    assert str(run("bf16")) == str(run("none"))


@check
def what_cannot_be():
    for compression in ("zip", 3):
        try:
            Strategy(compression=compression)
        except kt.TowerError as error:
            assert "bf16-feedback" in str(error)
        else:
            raise AssertionError(compression)
    strategy = Strategy(compression="fp16")
    with strategy.scope():
        # The sum of the ranks is one that float16 cannot hold.
        total = strategy.reduce("SUM", tf.constant(1e6 + RANK), axis=None)
    assert float(total) == 2e6 + 1
