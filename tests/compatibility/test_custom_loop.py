"""A custom training loop on towers trains as on one device."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.compatibility import loops
from tests.kit.long import long_but

optimizers = keras.optimizers
MODELS = {"dense": loops.dense_model, "sparse": loops.sparse_model}


def sgd(**options):
    return optimizers.SGD(0.1, momentum=0.9, **options)


# Strong enough that each changes what is learnt (see the test of that).
OPTIMIZERS = {
    "plain": sgd,
    "global_clipnorm": lambda: sgd(global_clipnorm=0.3),
    "clipnorm": lambda: sgd(clipnorm=0.1),
    "clipvalue": lambda: sgd(clipvalue=0.05),
    "accumulation": lambda: sgd(
        gradient_accumulation_steps=2, global_clipnorm=0.3
    ),
    "adamw": lambda: optimizers.AdamW(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "schedule": lambda: optimizers.RMSprop(
        optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    ),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(
        sgd(global_clipnorm=0.3), initial_scale=64.0, dynamic_growth_steps=2
    ),
}


def devices(towers: int) -> list[str]:
    return [f"/device:CPU:{index}" for index in range(towers)]


@functools.cache
def one_device(optimizer: str, model: str = "dense") -> loops.Outcome:
    return loops.train(None, OPTIMIZERS[optimizer], make_model=MODELS[model])


def assert_same(found: loops.Outcome, wanted: loops.Outcome) -> None:
    """Losses, weights and optimizer state agree, and so do the towers."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6)
    close(found.losses, wanted.losses)
    for mine, theirs in zip(found.weights, wanted.weights, strict=True):
        close(mine, theirs)
    for mine, theirs in zip(found.optimizer, wanted.optimizer, strict=True):
        close(mine, theirs)
    for variable in found.model.trainable_variables:
        first, *others = getattr(variable._value, "values", [variable])
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())


@pytest.mark.parametrize(
    ("optimizer", "towers"),
    long_but(
        lambda case: case[1] == 2 or case[0] == "loss_scale",
        [
            *((name, 2) for name in OPTIMIZERS),
            *((name, 1) for name in ("accumulation", "adamw", "loss_scale")),
        ],
    ),
)
def test_every_optimizer(optimizer, towers):
    found = loops.train(
        kt.TowerStrategy(devices(towers)), OPTIMIZERS[optimizer]
    )
    assert_same(found, one_device(optimizer))


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {"plain"}))
def test_every_optimizer_matters(optimizer):
    # Else a strategy that forgets to clip, say, would pass.
    plain = one_device("plain")
    if optimizer == "loss_scale":
        plain = one_device("adamw")
    other = one_device(optimizer)
    assert (
        max(
            np.abs(a - b).max()
            for a, b in zip(plain.weights, other.weights, strict=True)
        )
        > 1e-3
    )


# The scale of a loss is read before the optimizer is first used, and clipping
# is in there, too.
@pytest.mark.parametrize(
    ("style", "build_first"),
    long_but(
        lambda case: case[1] == (case[0] in ("eager", "step function")),
        itertools.product(loops.STYLES, (False, True)),
    ),
)
def test_every_style(style, build_first):
    found = loops.train(
        kt.TowerStrategy(devices(2)),
        OPTIMIZERS["loss_scale"],
        style,
        build_first=build_first,
    )
    assert_same(found, one_device("loss_scale"))


@pytest.mark.parametrize(
    ("mode", "updates"),
    [
        ("collective", "once"),
        ("hierarchical", "each"),
        ("gpu", "once"),
        ("cpu", "each"),
        ("cpu", "once"),
    ],
)
def test_every_mode(mode, updates):
    strategy = kt.TowerStrategy(devices(4), mode=mode, updates=updates)
    assert (strategy.mode, strategy.updates) == (mode, updates)
    found = loops.train(strategy, OPTIMIZERS["global_clipnorm"])
    assert_same(found, one_device("global_clipnorm"))


@pytest.mark.parametrize(
    ("optimizer", "updates"),
    long_but(
        lambda case: case[0] == "accumulation" or case[1] == "each",
        itertools.product(
            ("accumulation", "loss_scale"), ("once", "each", "sharded")
        ),
    ),
)
def test_sparse_gradients(optimizer, updates):
    found = loops.train(
        kt.TowerStrategy(devices(2), updates=updates),
        OPTIMIZERS[optimizer],
        make_model=loops.sparse_model,
    )
    assert_same(found, one_device(optimizer, "sparse"))


@pytest.mark.parametrize(
    ("style", "towers"),
    [("eager", 2), ("step function", 1), ("step function", 4)],
)
def test_adopted_model(style, towers):
    # Built as if there were no towers; it is an ordinary model afterwards.
    model, optimizer = loops.dense_model(), OPTIMIZERS["accumulation"]()
    with kt.TowerStrategy(devices(towers)) as strategy:
        strategy.adopt(model)
        losses = loops.loop(strategy, model, optimizer, style)
        assert_same(
            loops.outcome(model, optimizer, losses),
            one_device("accumulation"),
        )
    assert model._distribute_strategy is None
    assert_same(
        loops.outcome(model, optimizer, losses), one_device("accumulation")
    )


@pytest.mark.parametrize("towers", long_but((2).__eq__, [1, 2]))
def test_fit_and_a_loop_take_turns(towers):
    def turns(strategy):
        model = loops.dense_model()
        optimizer = OPTIMIZERS["global_clipnorm"]()
        model.compile(optimizer, "mse")
        model.fit(loops.data(model), epochs=1, verbose=0)
        losses = loops.loop(strategy, model, optimizer, "step function")
        logs = model.fit(loops.data(model), epochs=2, verbose=0)
        losses += logs.history["loss"]
        return loops.outcome(model, optimizer, losses)

    wanted = turns(tf.distribute.get_strategy())
    strategy = kt.TowerStrategy(devices(towers))
    with strategy.scope():
        assert_same(turns(strategy), wanted)


@pytest.mark.parametrize("towers", [1, 3])
def test_metrics(towers):
    def mean_of_squares(strategy):
        metrics = [keras.metrics.Mean(), keras.metrics.MeanSquaredError()]

        @tf.function
        def step(batch):
            def update(x):
                metrics[0].update_state(x)
                # A mean over the last axis, and then over examples.
                x = x[:, None]
                metrics[1].update_state(tf.zeros_like(x), x)

            strategy.run(update, (batch,))

        rows = tf.data.Dataset.range(21).map(lambda i: tf.cast(i, "float32"))
        for batch in strategy.experimental_distribute_dataset(rows.batch(6)):
            step(batch)
        found = [float(metric.result()) for metric in metrics]
        for metric in metrics:
            metric.reset_state()
            assert float(metric.result()) == 0.0
        return found

    wanted = mean_of_squares(tf.distribute.get_strategy())
    assert wanted == pytest.approx([10.0, sum(i * i for i in range(21)) / 21])
    strategy = kt.TowerStrategy(devices(towers))
    with strategy.scope():
        assert mean_of_squares(strategy) == pytest.approx(wanted)


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("traced", [False, True])
def test_a_loop_without_keras(traced, towers):
    def train(strategy):
        weight = tf.Variable(
            [1.0, -1.0], aggregation=tf.VariableAggregation.SUM
        )

        def replica_step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x @ weight[:, None] - 1.0) ** 2) / 8
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        def step(x):
            return strategy.reduce(
                "SUM", strategy.run(replica_step, (x,)), axis=None
            )

        step = tf.function(step) if traced else step
        x = np.random.default_rng(5).normal(size=(24, 2)).astype("float32")
        rows = tf.data.Dataset.from_tensor_slices(x).batch(8)
        batches = strategy.experimental_distribute_dataset(rows)
        return [float(step(x)) for x in batches], weight.numpy()

    losses, weight = train(tf.distribute.get_strategy())
    strategy = kt.TowerStrategy(devices(towers))
    with strategy.scope():
        found = train(strategy)
    assert found[0] == pytest.approx(losses, rel=1e-5)
    np.testing.assert_allclose(found[1], weight, rtol=1e-5)
    assert not np.allclose(weight, [1.0, -1.0], atol=0.01)
