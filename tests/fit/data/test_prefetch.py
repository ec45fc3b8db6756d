"""The second data path, which copies ahead to accelerators, on logical CPUs."""

import pytest
import tensorflow as tf

from tests.fit.data.prefetched import (
    assert_drawn_ahead,
    assert_strings_are_exact,
)
from tests.fit.data.test_inputs import W, X, Y, batches, fitting
from tests.kit.compare import assert_exact
from tests.kit.long import long_but
from tests.kit.training import compiled, strategy_of

SOURCES = ("numpy", "unknown length", "PyDataset")


def strategy(towers, each=False):
    return strategy_of(towers, True, batches="each" if each else "split")


def fixed_size(batch, count=48):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y, W)).take(count)
    return dataset.batch(batch, drop_remainder=True)


@pytest.mark.parametrize("source", long_but("PyDataset".__ne__, SOURCES))
def test_split(source):
    # 53 examples in batches of 7: pieces of 3, 3 and 1, in the end of 2, 2, 0.
    act = fitting(source, 7, epochs=1)
    assert_exact(compiled(), act, strategy(3))


@pytest.mark.parametrize("source", long_but("PyDataset".__eq__, SOURCES))
def test_each(source):
    act = fitting(source, 4, epochs=1)
    reference = fitting(source, 12, epochs=1)
    assert_exact(compiled(), act, strategy(3, True), reference)


def test_several_epochs():
    assert_exact(compiled(), fitting("numpy", 16), strategy(2))


def test_generator_to_each():
    act = fitting("generator", 8, epochs=1, steps_per_epoch=3)
    reference = fitting("generator", 16, epochs=1, steps_per_epoch=3)
    assert_exact(compiled(), act, strategy(2, True), reference)


def test_last_group_of_known_size_to_each():
    # TensorFlow drops an incomplete group where it knows the sizes of all.
    def act(model):
        return model.fit(fixed_size(12), verbose=0, shuffle=False)

    def reference(model):
        return model.fit(batches(24).take(2), verbose=0, shuffle=False)

    def act_on_48(model):
        return model.fit(fixed_size(16), verbose=0, shuffle=False)

    def reference_on_48(model):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y, W)).take(48)
        return model.fit(dataset.batch(32), verbose=0, shuffle=False)

    assert_exact(compiled(), act, strategy(2, True), reference)
    assert_exact(compiled(), act_on_48, strategy(2, True), reference_on_48)


@pytest.mark.parametrize("each", [False, True])
def test_batches_of_one_example(each):
    def act(model, batch=1):
        return model.fit(
            X[:5], Y[:5], batch_size=batch, shuffle=False, verbose=0
        )

    assert_exact(
        compiled(),
        act,
        strategy(4, each),
        lambda model: act(model, 4 if each else 1),
    )


@pytest.mark.parametrize("each", [False, True])
def test_fewer_steps_than_batches(each):
    act = fitting("tf.data", 4 if each else 8, steps_per_epoch=3)
    reference = fitting("tf.data", 8, steps_per_epoch=3)
    assert_exact(compiled(), act, strategy(2, each), reference)


def test_steps_per_execution():
    make = compiled(steps_per_execution=3)
    assert_exact(make, fitting("tf.data", epochs=1), strategy(2))


def test_shuffled_numpy():
    act = fitting("numpy", 16, shuffle=True)
    assert_exact(compiled(), act, strategy(2))


def test_validation():
    act = fitting(
        "numpy",
        16,
        epochs=1,
        validation_data=batches(5),
        validation_steps=3,
    )
    assert_exact(compiled(), act, strategy(2))


def test_evaluate_and_predict():
    def act(model):
        return (
            model.evaluate(batches(7), verbose=0),
            model.predict(X, batch_size=7, verbose=0),
        )

    assert_exact(compiled(), act, strategy(3))


def test_strings_and_dictionaries():
    assert_strings_are_exact(strategy(2))


def test_the_next_batch_is_read_while_the_current_one_computes():
    assert_drawn_ahead(strategy_of(2))
