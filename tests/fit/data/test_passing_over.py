"""Batches that are passed over: what follows is what would have followed."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.data.iterator import TowerEpochIterator
from tests.kit.long import long_but
from tests.kit.training import strategy_of

X = np.arange(22, dtype="float32")[:, None]
EPOCHS, BATCHES = 3, 6


class Rows(keras.utils.PyDataset):
    """Ordered anew by Keras, with Python's random numbers."""

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        return (X[4 * index : 4 * index + 4],)


def dataset():
    return tf.data.Dataset.from_tensor_slices(X).batch(4)


def generator():
    while True:
        for index in range(BATCHES + 1):
            yield (X[index : index + 4],)


SOURCES = {
    "arrays": lambda: {"x": X, "batch_size": 4},
    "shuffled arrays": lambda: {"x": X, "batch_size": 4, "shuffle": True},
    "dataset": lambda: {"x": dataset()},
    "shuffled dataset": lambda: {"x": dataset().shuffle(9, seed=3)},
    "unknown length": lambda: {"x": dataset().filter(lambda _: True)},
    "generator": lambda: {"x": generator(), "steps_per_epoch": BATCHES},
    "PyDataset": lambda: {"x": Rows(), "shuffle": True},
}


def started(source, steps_per_execution):
    keras.utils.set_random_seed(5)
    return TowerEpochIterator(
        strategy_of(2)._config,
        "fit",
        steps_per_execution=steps_per_execution,
        **{"shuffle": False, **SOURCES[source]()},
    )


def drawn(iterator, epochs, left_out=0):
    """The batches of some epochs, each with its epoch, as ``fit`` draws."""
    found = []
    for epoch in range(EPOCHS - epochs, EPOCHS):
        with iterator.catch_stop_iteration():
            for _, _, data in iterator:
                for _ in range(iterator.steps_per_execution):
                    batch = tf.nest.flatten(next(data))[0]
                    if left_out:
                        left_out -= 1
                        continue
                    found.append((epoch, batch.numpy().ravel().tolist()))
    return found


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "source, steps_per_execution",
    # Each in one way, in turn.
    long_but(
        lambda case: case[1] == (1, 4)[[*SOURCES].index(case[0]) % 2],
        itertools.product(SOURCES, (1, 4)),
    ),
)
def test_what_follows_is_the_same(source, steps_per_execution):
    whole = drawn(started(source, steps_per_execution), EPOCHS)
    assert len(whole) >= EPOCHS * BATCHES
    for batches in (0, 1, 5, 6, 7, 12, 17, len(whole)):
        it = started(source, steps_per_execution)
        epochs, left_out = it.pass_over(batches)
        found = drawn(it, EPOCHS - epochs, left_out)
        assert found == whole[batches:], batches


def test_data_that_ends_too_early_ends_it():
    it = started("dataset", 1)
    it._distributed_dataset = it._distributed_dataset.take(0)
    assert it.pass_over(3) == (0, 0)
