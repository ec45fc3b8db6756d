"""A custom training loop on towers trains as on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_towers_equal
from tests.kit.long import some_of

EXAMPLES, GLOBAL_BATCH, EPOCHS = 20, 8, 2
SGD = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
# Strong enough that each changes what is learnt.
OPTIMIZERS = {
    "accumulation": lambda: SGD(
        gradient_accumulation_steps=2, global_clipnorm=0.3
    ),
    "adamw": lambda: keras.optimizers.AdamW(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        SGD(global_clipnorm=0.3), initial_scale=64.0, dynamic_growth_steps=2
    ),
}


def dense_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(
                4, activation="tanh", kernel_constraint="max_norm"
            ),
            keras.layers.Dense(2),
        ]
    )


def sparse_model():
    """Its gradients are ``tf.IndexedSlices``."""
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            keras.layers.Embedding(5, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def data(model):
    """Batches of 8, 8 and 4 examples; sums over them are far from equal."""
    random = np.random.default_rng(3)
    x = random.normal(size=(EXAMPLES, 3)).astype("float32")
    if model.inputs[0].dtype == "int64":
        x = random.integers(0, 5, (EXAMPLES, 3))
    y = random.normal(size=(EXAMPLES, 2)).astype("float32")
    y *= np.linspace(0.1, 3.0, EXAMPLES, dtype="float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)


def loop(strategy, model, optimizer, style):
    """Train as TensorFlow's guide does; returns the loss of each epoch.

    A step is run by hand ("eager"), traced for each replica, or traced as a
    whole with the strategy inside, a step or an epoch at a time.
    """
    variables = model.trainable_variables
    distributed = strategy.experimental_distribute_dataset(data(model))

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=1)
            loss = tf.reduce_sum(errors) / GLOBAL_BATCH
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    if style == "replica function":
        replica_step = tf.function(replica_step)

    def step(batch):
        each = strategy.run(replica_step, (batch,))
        return strategy.reduce("SUM", each, axis=None)

    if style == "step function":
        step = tf.function(step, [distributed.element_spec])

    def epoch(batches):
        total = tf.constant(0.0)
        for batch in batches:
            total += step(batch)
        return total

    if style == "epoch function":
        epoch = tf.function(epoch)
    return [float(epoch(distributed)) for _ in range(EPOCHS)]


def values(variables):
    return [variable.numpy() for variable in variables]


@functools.cache
def one_device(optimizer, make_model):
    """Losses, weights and the optimizer's state of a loop without towers."""
    model, optimizer = make_model(), OPTIMIZERS[optimizer]()
    losses = loop(tf.distribute.get_strategy(), model, optimizer, "eager")
    return losses, values(model.variables), values(optimizer.variables)


def assert_same(losses, model, optimizer, wanted):
    """All are as on one device, and the towers alike."""
    found = losses, values(model.variables), values(optimizer.variables)
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)
    assert_towers_equal(model)


EACH, SHARDED = {"updates": "each"}, {"updates": "sharded"}
COLLECTIVE, IN_GROUPS = {"mode": "collective"}, {"mode": "hierarchical"}


# The scale of a loss is read before the optimizer is first used, and clipping
# is in there, too: some are built before.
@pytest.mark.parametrize(
    ("optimizer", "make_model", "style", "towers", "options"),
    some_of(
        [
            ("loss_scale", dense_model, "epoch function", 2, {}),
            ("loss_scale", sparse_model, "step function", 2, {"mode": "gpu"}),
            ("accumulation", sparse_model, "step function", 2, SHARDED),
            ("adamw", dense_model, "step function", 3, EACH),
            ("accumulation", dense_model, "replica function", 2, COLLECTIVE),
            ("adamw", dense_model, "eager", 3, IN_GROUPS),
        ]
    ),
)
def test_loop(optimizer, make_model, style, towers, options):
    strategy = kt.TowerStrategy(towers, **options)
    assert_exact(strategy, optimizer, make_model, style)


def assert_exact(strategy, optimizer, make_model, style):
    wanted = one_device(optimizer, make_model)
    with strategy.scope():
        model, optimizer = make_model(), OPTIMIZERS[optimizer]()
        if style != "epoch function":
            optimizer.build(model.trainable_variables)
    losses = loop(strategy, model, optimizer, style)
    assert_same(losses, model, optimizer, wanted)


def test_fit_and_a_loop_of_an_adopted_model_take_turns():
    """Built as if there were no towers; it is an ordinary model afterwards."""

    def act(strategy, model, optimizer):
        losses = []
        for _ in range(2):
            losses += loop(strategy, model, optimizer, "eager")
            fitted = model.fit(data(model), verbose=0)
            losses += fitted.history["loss"]
        return losses

    def made(**options):
        model, optimizer = dense_model(), OPTIMIZERS["accumulation"]()
        model.compile(optimizer, "mse", **options)
        return model, optimizer

    model, optimizer = made(run_eagerly=True)
    losses = act(tf.distribute.get_strategy(), model, optimizer)
    wanted = losses, values(model.variables), values(optimizer.variables)
    model, optimizer = made()
    with kt.TowerStrategy(2) as strategy:
        strategy.adopt(model)
        losses = act(strategy, model, optimizer)
        assert_same(losses, model, optimizer, wanted)
    assert model._distribute_strategy is None
    assert_same(losses, model, optimizer, wanted)


def test_metrics():
    def act(strategy):
        mean, squares = keras.metrics.Mean(), keras.metrics.MeanSquaredError()

        def update(x):
            mean.update_state(x)
            # A mean over the last axis, and then over examples.
            squares.update_state(tf.zeros_like(x)[:, None], x[:, None])

        step = tf.function(lambda batch: strategy.run(update, (batch,)))
        rows = tf.data.Dataset.range(21).map(lambda i: tf.cast(i, "float32"))
        for batch in strategy.experimental_distribute_dataset(rows.batch(6)):
            step(batch)
        found = [float(mean.result()), float(squares.result())]
        mean.reset_state()
        return [*found, float(mean.result())]

    wanted = [10.0, sum(i * i for i in range(21)) / 21, 0.0]
    strategy = kt.TowerStrategy(3)
    with strategy.scope():
        assert act(strategy) == pytest.approx(wanted)
