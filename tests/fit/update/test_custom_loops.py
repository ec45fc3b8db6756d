"""Custom training loops in a strategy's block train as on one device.

Such a loop runs outside of the steps of ``fit``: a tape, Keras's loss and
metric, and the model's optimizer, whose variables live on the towers.
"""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.training import X, Y, fit, linear

STEPS = 3
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, 0.9, clipnorm=0.1),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "accumulated": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2
    ),
    "averaged": lambda: keras.optimizers.AdamW(
        0.01, use_ema=True, ema_overwrite_frequency=2
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=8.0
    ),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "ftrl": keras.optimizers.Ftrl,
}


def make_model(optimizer):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()]
    return linear(*layers, optimizer=OPTIMIZERS[optimizer])


def run_custom_loop(model, apply_pairs=False, in_graph=False):
    """Train by a custom loop; return the losses and the accuracy.

    Args:
        model: the model.
        apply_pairs: whether to call ``apply_gradients`` in place of ``apply``.
        in_graph: whether the step is a ``tf.function``.
    """
    compute_loss = m.cross_entropy()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    optimizer, weights = model.optimizer, model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = compute_loss(y, scores)
            scaled_loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, weights)
        if apply_pairs:
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        else:
            optimizer.apply(gradients, weights)
        accuracy.update_state(y, scores)
        return loss

    if in_graph:
        # A function may create variables in its first call only.
        optimizer.build(weights)
        step = tf.function(step)
    losses = [float(step(X[:16], Y[:16])) for _ in range(STEPS)]
    return [*losses, float(accuracy.result())]


def train_twice(model, calls_fit, **loop_options):
    """Train by a loop, twice, optionally with ``fit`` after each."""
    logs = []
    for _ in range(2):
        logs += run_custom_loop(model, **loop_options)
        if calls_fit:
            fit(model)
    return logs


def state_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@functools.cache
def on_one_device(optimizer, calls_fit):
    model = make_model(optimizer)
    return train_twice(model, calls_fit), state_of(model)


IN_BLOCK, BEFORE_BLOCK = True, False
PAIRS, IN_GRAPH = {"apply_pairs": True}, {"in_graph": True}


@pytest.mark.parametrize(
    ("optimizer", "made_in_block", "updates", "calls_fit", "loop_options"),
    [
        ("momentum", IN_BLOCK, "once", False, {}),
        ("momentum", BEFORE_BLOCK, "sharded", True, {}),
        ("clipped", BEFORE_BLOCK, "once", True, {}),
        ("clipped", IN_BLOCK, "each", True, {}),
        ("accumulated", IN_BLOCK, "once", False, IN_GRAPH),
        ("accumulated", BEFORE_BLOCK, "once", True, PAIRS),
        ("averaged", IN_BLOCK, "once", False, PAIRS),
        ("averaged", BEFORE_BLOCK, "once", True, IN_GRAPH),
        ("scaled", BEFORE_BLOCK, "once", False, {}),
        ("scaled", IN_BLOCK, "once", True, {}),
        ("muon", IN_BLOCK, "once", False, {}),
        ("ftrl", IN_BLOCK, "once", False, {}),
    ],
)
def test_a_custom_loop_trains_as_on_one_device(
    optimizer, made_in_block, updates, calls_fit, loop_options
):
    wanted, wanted_state = on_one_device(optimizer, calls_fit)
    model = None if made_in_block else make_model(optimizer)
    with kt.TowerStrategy(2, updates=updates):
        model = model or make_model(optimizer)
        found = train_twice(model, calls_fit, **loop_options)
    assert_close(found, wanted, 1e-5)
    assert_all_close(state_of(model), wanted_state, 2e-5)
