"""A loop of the user's own in a block, outside of steps: as on one device."""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import all_close, close
from tests.kit.training import X, Y, fit, linear

KERAS = keras.optimizers


def scaled():
    return KERAS.LossScaleOptimizer(KERAS.Adam(0.01), initial_scale=8.0)


def averaged():
    return KERAS.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)


OPTIMIZERS = {
    "momentum": lambda: KERAS.SGD(0.1, 0.9, clipnorm=0.1),
    "clipped": lambda: KERAS.Adam(0.01, global_clipnorm=0.1),
    "accumulated": lambda: KERAS.Adam(0.01, gradient_accumulation_steps=2),
    "averaged": averaged,
    "scaled": scaled,
    "muon": lambda: KERAS.Muon(0.01),
    "ftrl": KERAS.Ftrl,
}


def model_of(optimizer):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()]
    return linear(*layers, optimizer=OPTIMIZERS[optimizer])


def looped(model, pairs=False, wrap=lambda step: step, steps=3):
    """A tape, Keras's loss and metric, and the optimizer; then its state."""
    loss_of = m.cross_entropy()
    metric = keras.metrics.SparseCategoricalAccuracy()
    if wrap is tf.function:
        # Which makes no variables but at first.
        model.optimizer.build(model.trainable_variables)

    @wrap
    def step(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = loss_of(y, scores)
            given = model.optimizer.scale_loss(loss)
        variables = model.trainable_variables
        grads = tape.gradient(given, variables)
        if pairs:
            together = zip(grads, variables, strict=True)
            model.optimizer.apply_gradients(together)
        else:
            model.optimizer.apply(grads, variables)
        metric.update_state(y, scores)
        return loss

    losses = [float(step(X[:16], Y[:16])) for _ in range(steps)]
    return [*losses, float(metric.result())]


def state_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@functools.cache
def on_one_device(optimizer, fits):
    model = model_of(optimizer)
    found = []
    for _ in range(2):
        found += looped(model)
        if fits:
            fit(model)
    return found, state_of(model)


@pytest.mark.parametrize(
    "optimizer, inside, options",
    [
        ("momentum", True, {}),
        ("momentum", False, {"fits": True, "updates": "sharded"}),
        ("clipped", False, {"fits": True}),
        ("clipped", True, {"fits": True, "updates": "each"}),
        ("accumulated", True, {"wrap": tf.function}),
        ("accumulated", False, {"fits": True, "pairs": True}),
        ("averaged", True, {"pairs": True}),
        ("averaged", False, {"fits": True, "wrap": tf.function}),
        ("scaled", False, {}),
        ("scaled", True, {"fits": True}),
        ("muon", True, {}),
        ("ftrl", True, {}),
    ],
)
def test_a_custom_loop_outside_of_steps_is_that_of_one_device(
    optimizer, inside, options
):
    given = {"fits": False, "updates": "once", **options}
    fits, updates = given.pop("fits"), given.pop("updates")
    wanted, state = on_one_device(optimizer, fits)
    model, found = None if inside else model_of(optimizer), []
    with kt.TowerStrategy(2, updates=updates):
        if inside:
            model = model_of(optimizer)
        for _ in range(2):
            found += looped(model, **given)
            if fits:
                fit(model)
    close(found, wanted, 1e-5)
    all_close(state_of(model), state, 2e-5)
