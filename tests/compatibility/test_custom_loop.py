"""A custom training loop on towers trains as on one device."""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import (
    assert_close,
    assert_same_model,
    assert_towers_equal,
)
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.alternate

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
    "clipped": lambda: SGD(clipnorm=0.1),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "ftrl": keras.optimizers.Ftrl,
}


def dense_model():
    keras.utils.set_random_seed(1)
    return m.mlp(keras.layers.Dense(5, kernel_constraint="max_norm"))


def normed_model():
    keras.utils.set_random_seed(1)
    return m.mlp(keras.layers.BatchNormalization())


def made(optimizer, make_model, **options):
    """A model with an optimizer, for a loop or for ``fit``."""
    model = make_model()
    model.compile(OPTIMIZERS[optimizer](), m.cross_entropy(), **options)
    return model


def data(model):
    """Batches of 8, 8 and 4 examples."""
    is_sparse = model.inputs[0].dtype == "int32"
    x = (m.TOKENS if is_sparse else m.FEATURES)[:EXAMPLES]
    rows = tf.data.Dataset.from_tensor_slices((x, m.LABELS[:EXAMPLES]))
    return rows.batch(GLOBAL_BATCH)


def loop(strategy, model, style):
    """Train as TensorFlow's guide does; returns the loss of each epoch.

    A step is run by hand ("eager"), traced for each replica, or traced as a
    whole with the strategy inside, a step or an epoch at a time. Where it is
    "outside of replicas", nothing asks the strategy to run anything.
    """
    variables, optimizer = model.trainable_variables, model.optimizer
    loss_of = m.cross_entropy(reduction=None)
    distributed = strategy.experimental_distribute_dataset(data(model))

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = loss_of(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    if style == "replica function":
        replica_step = tf.function(replica_step)

    def step(batch):
        each = strategy.run(replica_step, (batch,))
        return strategy.reduce("SUM", each, axis=None)

    if "outside of replicas" in style:
        distributed, step = data(model), replica_step

    if style.startswith("step function"):
        step = tf.function(step, [distributed.element_spec])

    def epoch(batches):
        total = tf.constant(0.0)
        for batch in batches:
            total += step(batch)
        return total

    if style == "epoch function":
        epoch = tf.function(epoch)
    return [float(epoch(distributed)) for _ in range(EPOCHS)]


@functools.cache
def one_device(optimizer, make_model):
    """The losses of a loop without towers, and the model."""
    model = made(optimizer, make_model)
    return loop(tf.distribute.get_strategy(), model, "eager"), model


def assert_same(losses, model, wanted):
    """All are as on one device, and the towers alike."""
    assert_close(losses, wanted[0], 1e-5)
    assert_same_model(model, wanted[1], 1e-5)
    assert_towers_equal(model)


EACH, SHARDED = {"updates": "each"}, {"updates": "sharded"}
COLLECTIVE, IN_GROUPS = {"mode": "collective"}, {"mode": "hierarchical"}
ON_TOWERS = {"mode": "towers"}


# The scale of a loss is read before the optimizer is first used, and clipping
# is in there, too: some are built before.
@pytest.mark.parametrize(
    ("optimizer", "make_model", "style", "towers", "options"),
    sample_of(
        [
            ("loss_scale", dense_model, "epoch function", 2, {}),
            ("loss_scale", m.with_embedding, "step function", 2, ON_TOWERS),
            ("accumulation", m.with_embedding, "step function", 2, SHARDED),
            ("adamw", dense_model, "step function", 3, EACH),
            ("accumulation", dense_model, "replica function", 2, COLLECTIVE),
            ("adamw", dense_model, "eager", 3, IN_GROUPS),
        ],
        3,
    ),
)
def test_a_custom_loop_trains_as_on_one_device(
    optimizer, make_model, style, towers, options
):
    strategy = kt.TowerStrategy(towers, **options)
    assert_exact(strategy, optimizer, make_model, style)


def assert_exact(strategy, optimizer, make_model, style):
    with strategy.scope():
        model = made(optimizer, make_model)
        if style != "epoch function":
            model.optimizer.build(model.trainable_variables)
    losses = loop(strategy, model, style)
    assert_same(losses, model, one_device(optimizer, make_model))


def in_turns(strategy, model, style):
    """A loop and ``fit``, twice; the losses of all."""
    losses = []
    for _ in range(2):
        losses += loop(strategy, model, style)
        losses += model.fit(data(model), verbose=0).history["loss"]
    return losses


@functools.cache
def in_turns_on_one_device(optimizer, make_model):
    model = made(optimizer, make_model, run_eagerly=True)
    return in_turns(tf.distribute.get_strategy(), model, "eager"), model


BEFORE, INSIDE = "made before the block", "made inside"
OUTSIDE = "outside of replicas"
TRACED = "step function outside of replicas"


@pytest.mark.parametrize(
    ("optimizer", "make_model", "place", "style", "updates"),
    sample_of(
        [
            ("accumulation", dense_model, BEFORE, "eager", "once"),
            ("accumulation", normed_model, INSIDE, TRACED, "once"),
            ("adamw", normed_model, BEFORE, TRACED, "each"),
            ("adamw", normed_model, INSIDE, OUTSIDE, "once"),
            ("loss_scale", normed_model, BEFORE, OUTSIDE, "once"),
            ("clipped", normed_model, BEFORE, OUTSIDE, "sharded"),
            ("clipped", normed_model, INSIDE, OUTSIDE, "each"),
            ("muon", normed_model, INSIDE, OUTSIDE, "once"),
            ("ftrl", normed_model, INSIDE, OUTSIDE, "once"),
        ],
        3,
    ),
)
def test_fit_and_a_loop_take_turns(
    optimizer, make_model, place, style, updates
):
    """The model is an ordinary one afterwards, if it was before."""
    wanted = in_turns_on_one_device(optimizer, make_model)
    model = made(optimizer, make_model) if place == BEFORE else None
    with kt.TowerStrategy(2, updates=updates) as strategy:
        model = model or made(optimizer, make_model)
        strategy.adopt(model)
        if style == TRACED:
            # A function may create variables in its first call only.
            model.optimizer.build(model.trainable_variables)
        found = in_turns(strategy, model, style)
        assert_same(found, model, wanted)
    assert model._distribute_strategy is None
    assert_same(found, model, wanted)


def test_metrics_of_a_loop_count_all_examples():
    def update(x):
        mean.update_state(x)
        # A mean over the last axis, and then over examples.
        squares.update_state(tf.zeros_like(x)[:, None], x[:, None])

    strategy = kt.TowerStrategy(3)
    with strategy.scope():
        mean = keras.metrics.Mean()
        squares = keras.metrics.MeanSquaredError()
        step = tf.function(lambda batch: strategy.run(update, (batch,)))
        rows = tf.data.Dataset.range(21).map(lambda i: tf.cast(i, "float32"))
        for batch in strategy.experimental_distribute_dataset(rows.batch(6)):
            step(batch)
        assert float(mean.result()) == 10
        assert_close(squares.result(), sum(i * i for i in range(21)) / 21)
        mean.reset_state()
        assert float(mean.result()) == 0
