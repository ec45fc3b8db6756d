"""Losses that couple the examples of a batch, and gradients by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import coupled as c
from tests.exactness import models as m
from tests.kit.compare import assert_exact, close, same_model

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def together(model, x, y):
    """Own rows against all, a queue, means, and second derivatives."""
    losses = c.clip, c.nnclr, c.masked_mean, c.weighted_mean, c.gradient_penalty
    return tf.add_n([loss(model, x, y) for loss in losses])


def with_rows(model, x, y):
    """Of a weight only some rows have a gradient."""
    chosen = tf.gather(model.unused, y % 2)
    return c.masked_mean(model, x, y) + tf.reduce_mean(chosen * x[:, 0])


def clipped_rows(model, gradients, loss_of):
    assert any(isinstance(g, tf.IndexedSlices) for g in gradients)
    gradients = c.clipped(model, gradients, loss_of)
    assert any(isinstance(g, tf.IndexedSlices) for g in gradients)
    return gradients


def _loss_scaled():
    return keras.optimizers.LossScaleOptimizer(m.momentum(), initial_scale=64.0)


def sums(model, x, y):
    z = model.unit(x)
    return 0.1 * tf.reduce_sum(tf.matmul(z, kt.gather(z), transpose_b=True))


@pytest.mark.parametrize(
    "make, strategy, options",
    [
        (c.coupled(together), kt.TowerStrategy, {}),
        (
            c.coupled(with_rows, clipped_rows, _loss_scaled, scale=True),
            *(kt.TowerStrategy, {}),
        ),
        # Which the second pass finds changed only where it exists once.
        (
            c.coupled(c.penalty_on_a_mean, c.sharpness_aware),
            *(kt.ParameterServerTowerStrategy, {}),
        ),
        (c.coupled(sums, c.clipped), kt.TowerStrategy, {"average": False}),
    ],
)
def test_steps_that_couple_examples(make, strategy, options):
    def act(model):
        logs = c.training()(model)
        # The log of a sum is not that of one device.
        return None if options else logs

    assert_exact(make, act, strategy(3, **options))


def test_towers_that_draw_batches_of_their_own():
    # Batches of 4, 4 and 2 in the end, on one device batches of 12.
    def act(model, batch=4):
        options = {"batch_size": batch, "shuffle": False, "verbose": 0}
        model.fit(c.X[:22], c.Y[:22], **options)
        return model.predict(c.X[:22], batch_size=5, verbose=0)

    assert_exact(
        c.coupled(c.simclr, c.clipped),
        act,
        kt.TowerStrategy(3, batches="each"),
        reference=lambda model: act(model, 12),
    )


@pytest.mark.core
def test_in_keras_own_step_on_single_batches():
    """In a layer and in a loss, also in evaluation and prediction."""

    class Competing(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * tf.reduce_sum(kt.mean(x, axis=0) ** 2))
            return x - 0.5 * kt.mean(x, axis=0)

    def loss(y, prediction):
        y, z = kt.gather((y, prediction))
        pairs = tf.matmul(z, z, transpose_b=True)
        same = tf.cast(y == tf.transpose(y), tf.float32)
        return tf.reduce_mean((kt.gather(tf.tanh(pairs)) - same) ** 2)

    def make():
        model = m.mlp(Competing())
        model.compile(m.momentum(global_clipnorm=0.1), loss)
        return model

    def act(model):
        y = c.Y[:, None]
        trained = model.train_on_batch(c.X[:8], y[:8])
        tested = model.test_on_batch(c.X[:7], y[:7])
        return trained, tested, model.predict_on_batch(c.X[:7])

    assert_exact(make, act, kt.TowerStrategy(3))


HALF = tf.constant(64.0, tf.float16)


def _on_towers(towers, fn, *batch, **options):
    """Run a function in a step of each tower; returns the results."""
    seen = {}

    def step(data):
        results = fn(*(part for part in data if part is not None))
        index = kt.current_tower().index
        seen[index] = tf.nest.map_structure(lambda t: t.numpy(), results)
        return {"loss": model.weights[0][0, 0]}

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(run_eagerly=True)
    model.train_step = step
    with kt.TowerStrategy(towers, **options):
        model.train_on_batch(*batch)
    return [seen[index] for index in range(towers)]


@pytest.mark.parametrize("count", [7, 2])
def test_every_tower_gets_all_rows_in_order(count):
    x = np.arange(2 * count, dtype="float32").reshape(count, 2)
    y = np.array([f"row {index}".encode() for index in range(count)], "object")

    def values(x, y):
        types = tf.bool, tf.int32, tf.float16, tf.float64
        rows = [x, y, tf.complex(x, -x), *(tf.cast(x, t) for t in types)]
        return {"rows": rows, "twice": tf.repeat(x, 2, 0)}

    wanted = tf.nest.map_structure(np.array, values(x, y))
    for found in _on_towers(4, lambda x, y: kt.gather(values(x, y)), x, y):
        tf.nest.map_structure(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_a_tower_selects(dtype):
    x = np.arange(8, dtype="float32")[:, None]
    y = np.array([1, 0, 0, 0, 1, 1, 1, 0])

    def fn(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = kt.gather(tf.cast(tf.boolean_mask(x, y > 0), dtype))
            loss = tf.reduce_sum(tf.cast(rows, tf.float32) ** 2)
        return rows, tape.gradient(loss, x)

    results = _on_towers(4, fn, x, y)
    for rows, _ in results:
        np.testing.assert_array_equal(rows, x[y > 0])
    slopes = np.concatenate([slope for _, slope in results])
    # The four towers' losses are averaged, each over its own weight.
    np.testing.assert_allclose(slopes, 4 * 2 * x * y[:, None])


def test_means():
    values = np.arange(14, dtype="float32").reshape(7, 2)
    mask = np.array([0, 1, 1, 0, 0, 0, 1], "float32")

    chosen = values[mask > 0]
    # Of the last, the sum is too large for its type.
    wanted = [
        (lambda x, mask: kt.mean(x), values.mean()),
        (kt.mean, chosen.mean()),
        (lambda x, mask: kt.mean(x, mask > 0, axis=0), chosen.mean(0)),
        (lambda x, mask: kt.mean(x, x > 3.0), values[values > 3].mean()),
        (lambda x, mask: kt.mean(x, tf.zeros_like(x)), 0.0),
        (lambda x, mask: kt.mean(tf.cast(x, tf.int64), axis=(0, 1)), 6.5),
        (lambda x, mask: kt.mean(x > 3.0), (values > 3).mean()),
        (lambda x, mask: kt.mean(tf.fill([3000, 1], HALF)), np.float16(64)),
    ]

    def fn(x, mask):
        return [mean(x, mask) for mean, _ in wanted]

    on_one_device = [t.numpy() for t in fn(values, mask)]
    for found in (on_one_device, *_on_towers(3, fn, values, mask)):
        assert found[-1].dtype == "float16"
        for mine, (_, value) in zip(found, wanted, strict=True):
            close(mine, value)


def test_outside_of_towers_nothing_changes():
    x = tf.ones((2, 3))
    gradients = [x, None]
    with kt.TowerStrategy(2):
        assert kt.gather(x) is x
        assert kt.reduce_gradients(gradients) == gradients
        model = c.coupled(c.simclr)()
        # Symbolically, as Keras does.
        shape = keras.layers.Lambda(kt.gather).compute_output_shape((None, 3))
        assert shape == (None, 3)
    assert kt.gather(x) is x
    clipped, norm = kt.clip_by_global_norm(gradients, 0.5)
    close(norm, 6**0.5)
    close(tf.norm(clipped[0]), 0.5)
    assert clipped[1] is None
    assert model.loss_of(model, c.X, c.Y).shape == ()


def _only_some(x):
    mine = x if kt.current_tower().index else None
    return kt.clip_by_global_norm([x, mine], 1.0)


REFUSED = {
    "kt.gather.*scalar|shape \\(\\)": lambda x: kt.gather(tf.reduce_sum(x)),
    "kt.gather.*RaggedTensor: make it dense": lambda x: kt.gather(
        tf.RaggedTensor.from_tensor(x)
    ),
    "kt.mean.*known number": lambda x: kt.mean(tf.reduce_sum(x)),
    "kt.mean.*axis=1.*axis 0": lambda x: kt.mean(x, axis=1),
    "kt.mean.*leading dimensions": lambda x: kt.mean(x[:, 0], x),
    "gradient 1": _only_some,
    "average=False.*clip_by_global": lambda x: kt.reduce_gradients([x]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    options = {"average": False} if "average" in message else {}
    with pytest.raises(kt.TowerError, match=message):
        _on_towers(2, REFUSED[message], c.X[:8], **options)


def test_other_strategies_are_refused():
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(kt.TowerError, match="MirroredStrategy"):
        stock.run(lambda: kt.gather(tf.ones((2, 1))))


def test_custom_training_loop():
    """Losses of towers are added up there, as TensorFlow's guides do."""
    reference, model = c.coupled(c.plain)(), c.coupled(c.plain)()

    def step(model, x, parts):
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            rows = kt.gather(tf.tanh(kt.gather(model.body(x))))
            similar = tf.matmul(rows, rows, transpose_b=True)
            loss = tf.reduce_mean(similar**3) / parts
        grads = tape.gradient(loss, variables)
        grads, norm = kt.clip_by_global_norm(grads, 0.1)
        model.optimizer.apply(grads, variables)
        return norm

    batches = np.split(c.X[:16], 2)
    wanted = [step(reference, x, 1) for x in batches]
    strategy = kt.TowerStrategy(2)
    with strategy:
        strategy.adopt(model)

        @tf.function
        def on_towers(x):
            parts = strategy.experimental_distribute_values_from_function(
                lambda context: tf.split(x, 2)[context.replica_id_in_sync_group]
            )
            return strategy.run(step, (model, parts, 2))

        for x, norm in zip(batches, wanted, strict=True):
            norms = on_towers(tf.constant(x))
            for mine in strategy.experimental_local_results(norms):
                close(mine, norm)
    same_model(model, reference)
