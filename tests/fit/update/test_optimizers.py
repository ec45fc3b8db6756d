"""Updates equal those of Keras, with fewer operations.

One for each weight of SGD; those of other optimizers are traced once for all
weights of a kind.
"""

import collections
import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.update import optimizers
from keras_towers.fit.update.optimizers import as_one_device

pytestmark = pytest.mark.core

KERAS = keras.optimizers
FUSED = ("ResourceApplyKerasMomentum", "ResourceApplyGradientDescent")
SHAPES = [(4, 3), (3,), (4, 3), (3,), (2, 3, 2)]


# Every optimizer with every option is in ``tests/exactness/classes``.
def scheduled():
    schedule = KERAS.schedules.ExponentialDecay(0.1, 2, 0.5)
    return KERAS.Adam(
        schedule, amsgrad=True, use_ema=True, ema_overwrite_frequency=2
    )


MADE = functools.partial
NESTEROV = MADE(KERAS.SGD, 0.1, 0.9, nesterov=True)
DECAYED = MADE(KERAS.SGD, 0.1, 0.9, weight_decay=0.1, clipnorm=0.5)


def gradients_for(shapes, steps=2, dtype="float32"):
    random = np.random.default_rng(1)
    return [
        [tf.constant(random.normal(size=shape), dtype) for shape in shapes]
        for _ in range(steps)
    ]


def trained(optimizer, steps, here, given=lambda *gradients: gradients):
    """Apply gradients to weights.

    Args:
        optimizer: the optimizer.
        steps: the gradients of each step.
        here: whether this package's updates replace those of Keras.
        given: makes of the gradients what the optimizer is given.

    Returns:
        The weights and the optimizer's slots, and the operations of each type.
    """
    random = np.random.default_rng(2)
    weights = [
        keras.Variable(
            random.normal(size=g.shape), dtype=g.dtype.name, name=f"w{i}"
        )
        for i, g in enumerate(steps[0])
    ]
    optimizer.build(weights)

    @tf.function
    def apply(*gradients):
        ours = as_one_device(optimizer, weights)
        with ours if here else contextlib.nullcontext():
            optimizer.apply(list(given(*gradients)), weights)

    for step in steps:
        apply(*step)
    graph = apply.get_concrete_function(*steps[0]).graph
    values = [np.array(v) for v in (*weights, *optimizer.variables)]
    return values, collections.Counter(op.type for op in graph.get_operations())


def assert_as_keras(make, steps, **options):
    """Return the operations of each type, with our updates and without."""
    ours, found = trained(make(), steps, True, **options)
    reference, wanted = trained(make(), steps, False, **options)
    for mine, theirs in zip(ours, reference, strict=True):
        mine, theirs = mine.astype("float64"), theirs.astype("float64")
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-7)
    assert not any(wanted[kind] for kind in FUSED)
    return found, wanted


@pytest.mark.parametrize(
    "make, dtype, fused",
    [
        (MADE(KERAS.SGD, 0.1), "float32", True),
        (MADE(KERAS.SGD, 0.1), "float64", True),
        (MADE(KERAS.SGD, 0.1), "float16", False),
        (NESTEROV, "float32", True),
        (DECAYED, "float32", True),
        (scheduled, "float32", False),
        (scheduled, "bfloat16", False),
    ],
)
def test_the_result_is_that_of_keras(make, dtype, fused, monkeypatch):
    repetitions = []
    record = optimizers.RecordedOperations.repeat

    def counted(self, inputs):
        repetitions.append(inputs)
        record(self, inputs)

    monkeypatch.setattr(optimizers.RecordedOperations, "repeat", counted)
    found, _ = assert_as_keras(make, gradients_for(SHAPES, dtype=dtype))
    assert sum(found[kind] for kind in FUSED) == fused * len(SHAPES)
    if make is scheduled:
        assert len(repetitions) >= 2


def test_writes_and_reads_are_those_of_keras():
    """Weights share what none of them changes."""
    make = MADE(KERAS.Adam, 0.1)
    ours, reference = assert_as_keras(make, gradients_for(SHAPES, 1))
    for kind in ("AssignAddVariableOp", "AssignSubVariableOp"):
        assert ours[kind] == reference[kind]
    assert ours["Sqrt"] == len(SHAPES) + 1
    assert reference["Sqrt"] == 2 * len(SHAPES)


def test_decay_of_weights_is_that_of_keras():
    """Weights share what none of them changes, and some are excluded."""

    def make():
        optimizer = KERAS.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["w1"])
        return optimizer

    gradients = gradients_for([(2,), (3, 2), (4,), (5,)], 1)
    ours, reference = assert_as_keras(make, gradients)
    for kind in ("AssignAddVariableOp", "AssignSubVariableOp", "Mul"):
        assert ours[kind] <= reference[kind]
    assert ours["AssignSubVariableOp"] == reference["AssignSubVariableOp"]
    assert reference["ReadVariableOp"] - ours["ReadVariableOp"] >= 2


@pytest.mark.parametrize("cls", [KERAS.Adam, KERAS.SGD])
def test_sparse_missing_and_shapeless_gradients(cls):
    """Rows, missing ones, and such of unknown shape."""

    def given(first, *others):
        rows = tf.IndexedSlices(
            tf.ones((2, 3)), tf.constant([0, 2]), tf.constant([4, 3])
        )
        shapeless = tf.numpy_function(lambda g: g, [first], tf.float32)
        assert shapeless.shape.rank is None
        return first, rows, shapeless, None, others[0], shapeless

    gradients = gradients_for([(4, 3)] * 6)
    assert_as_keras(MADE(cls, 0.1), gradients, given=given)


def halved():
    class Halved(KERAS.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient / 2, variable, learning_rate)

    return Halved(0.2)


def by_name():
    adam = KERAS.Adam(0.1)
    usual = adam.update_step
    adam.update_step = lambda g, v, lr: "w1" in v.name or usual(g, v, lr)
    return adam


@pytest.mark.parametrize("make", [halved, by_name])
def test_custom_update_rules_are_called_for_every_weight(make):
    found, _ = assert_as_keras(make, gradients_for([(2,), (2,), (2,)]))
    assert not any(found[kind] for kind in FUSED)


def test_updates_that_draw_or_read_other_weights_are_not_shared(monkeypatch):
    """Even if an optimizer of Keras did so one day."""
    other = tf.Variable([1.0, 2.0])

    class Odd(KERAS.Adam):
        def assign_sub(self, variable, value):
            noise = tf.random.uniform([]) * 0 + other
            super().assign_sub(variable, value * noise)

    monkeypatch.setattr(optimizers, "repeats", lambda optimizer: True)
    gradients = gradients_for([(2,), (2,), (2,)])
    found, _ = assert_as_keras(lambda: Odd(0.1), gradients)
    assert found["RandomUniform"] == 3
