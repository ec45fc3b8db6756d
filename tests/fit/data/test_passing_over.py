"""Batches that are passed over: what follows is what would have followed."""

import keras
import pytest
import tensorflow as tf

from keras_towers.fit.data.iterator import TowerEpochIterator
from tests.fit.data.test_inputs import SOURCES
from tests.kit.long import some_of
from tests.kit.training import strategy_of

EPOCHS, BATCHES = 2, 7


def started(source, steps_per_execution=1):
    keras.utils.set_random_seed(5)
    return TowerEpochIterator(
        strategy_of(2)._config,
        "fit",
        lambda: None,
        steps_per_execution=steps_per_execution,
        # Keras orders them anew: one with TensorFlow's, one with Python's
        # random numbers.
        shuffle=source in ("numpy", "PyDataset"),
        **SOURCES[source](8),
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
                    found.append((epoch, batch.numpy().tolist()))
    return found


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "source, steps_per_execution",
    some_of(
        [
            ("numpy", 4),
            ("tf.data", 1),
            ("unknown length", 4),
            ("shuffled", 1),
            ("PyDataset", 4),
            ("generator", 1),
        ]
    ),
)
def test_what_follows_is_the_same(source, steps_per_execution):
    whole = drawn(started(source, steps_per_execution), EPOCHS)
    assert len(whole) >= EPOCHS * BATCHES
    for batches in (0, 1, 7, 10):
        it = started(source, steps_per_execution)
        epochs, left_out = it.pass_over(batches)
        found = drawn(it, EPOCHS - epochs, left_out)
        assert found == whole[batches:], batches


def test_data_that_ends_too_early_ends_it():
    it = started("tf.data")
    it._distributed_dataset = it._distributed_dataset.take(0)
    assert it.pass_over(3) == (0, 0)
