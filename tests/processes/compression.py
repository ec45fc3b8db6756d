"""Checks of a worker: how gradients travel between two ranks."""

import functools
import pathlib
import sys
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.reduction import shared_memory
from tests.kit.again import begin_again
from tests.kit.compare import assert_all_close
from tests.kit.ranks import check
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path()
X = np.random.default_rng(0).normal(size=(s.COUNT, 96)).astype("float32")
# Both layers together are more than what small messages may have.
WIDTH = 900
BATCH = 24


def built(seed, width):
    keras.utils.set_random_seed(seed)
    layers = keras.layers.Dense(width, "tanh"), keras.layers.Dense(3)
    model = keras.Sequential([keras.layers.Input((96,)), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return model


def train(compression):
    """Weights after three batches: those of this rank, equal to the other's."""
    keras.backend.clear_session()
    mine = built(0, WIDTH)
    with s.Strategy(compression=compression):
        # With fewer examples, ranks would send rows instead of gradients.
        s.fit(mine, X, batch_size=BATCH)
    s.assert_same_model(mine)
    return mine.get_weights()


@functools.cache
def exactly():
    """Weights after training with gradients that are sent as they are."""
    return train("none")


def difference(first, second):
    return max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))


@check
def shared_memory_is_exact_to_the_bit():
    before = set(shared_memory.FOLDER.iterdir())
    memories = []
    collect = shared_memory.SharedBucket.collect

    def counted(bucket, ranks):
        memories.append(bucket._memory)
        return collect(bucket, ranks)

    with (
        mock.patch.object(shared_memory.SharedBucket, "collect", counted),
        # Each gradient is a bucket.
        mock.patch.object(shared_memory, "BUCKET_BYTES", 1),
    ):
        assert difference(train(None), exactly()) == 0
    # Four gradients of each batch take turns.
    assert len(memories) == 3 * 4
    assert len(set(memories)) == 2
    left = set(shared_memory.FOLDER.iterdir()) - before
    assert not [p for p in left if p.name.startswith("keras-towers")]


@check
def models_in_turn_are_trained_as_each_alone():
    """What one gradient has lost is never added to another model's."""

    def first_of(*seeds):
        models = [built(seed, 64) for seed in seeds]
        with s.Strategy(compression="power-sgd"):
            for _ in range(3):
                for each in models:
                    each.train_on_batch(X[:20], s.Y[:20])
        return models[0].get_weights()

    assert difference(first_of(0), first_of(0, 1)) < 1e-7


def resumed_as_undisturbed(**options):
    """Train, end and go on from a backup, as if it had not ended.

    Returns:
        This rank's state of the hook, own values first.
    """

    def trained(name, *callbacks):
        mine, strategy = built(0, WIDTH), s.Strategy(**options)
        folder = FOLDER / f"{options['compression']}-{name}"
        backup = kt.Backup(folder, every=2)
        with strategy:
            s.fit(mine, X, batch_size=10, callbacks=[backup, *callbacks])
        (state,) = strategy._update.rank_sum.states(mine.optimizer)
        leaves = tf.nest.flatten(state)
        return mine.get_weights(), [leaf.numpy() for leaf in leaves]

    undisturbed = trained("undisturbed")
    with pytest.raises(s.Boom):
        trained("broken", s.breaks_behind(3))
    # Of another strategy and another model, too.
    begin_again()
    resumed = trained("broken")
    for found, wanted in zip(resumed, undisturbed, strict=True):
        assert_all_close(found, wanted)
    return undisturbed[1]


@check
def a_hook_goes_on_with_its_state_from_a_backup():
    own, *_ = resumed_as_undisturbed(compression="power-sgd")
    assert np.abs(np.subtract(*s.gather(own))).max() > 1e-6
    resumed_as_undisturbed(
        compression="bf16-feedback", sync_every=2, outer_momentum=0.5
    )


@check
def sparse_gradients_and_metrics_stay_exact():
    def run(compression):
        keras.utils.set_random_seed(0)
        layers = keras.layers.Embedding(50, 8), keras.layers.Flatten()
        model = keras.Sequential([keras.layers.Input((3,)), *layers])
        model.compile("sgd", "mse")
        ids = np.arange(75).reshape(25, 3) % 7
        with s.Strategy(compression=compression):
            history = s.fit(model, ids, np.ones((25, 24)), batch_size=10)
        return model.get_weights(), history.history

    assert str(run("bf16")) == str(run("none"))


@check
def values_of_users_are_never_compressed():
    strategy = s.Strategy(compression="fp16")
    with strategy.scope():
        # The sum of the ranks is one that float16 cannot hold.
        total = strategy.reduce("SUM", tf.constant(1e6 + s.RANK), axis=None)
    assert float(total) == 2e6 + 1
