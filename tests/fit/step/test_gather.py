"""Losses that couple the examples of a batch, and gradients by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import coupled as c
from tests.exactness import models as m
from tests.kit.compare import assert_exact, close
from tests.kit.long import long_but

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


@pytest.mark.parametrize(
    "loss, towers",
    long_but(
        lambda case: (
            case
            not in [
                ("simclr", 3),
                ("weighted_mean", 3),
                ("gradient_penalty", 8),
            ]
        ),
        [
            *((loss, 3) for loss in c.LOSSES),
            *(("simclr", 8), ("gradient_penalty", 8)),
        ],
    ),
)
def test_losses_that_couple_examples(loss, towers):
    make = c.coupled(c.LOSSES[loss])
    assert_exact(make, c.training(), kt.TowerStrategy(towers))


@pytest.mark.core
@pytest.mark.parametrize("count", [24, 25])
def test_contrastive_loss_of_two_towers(count):
    # Even batches, and one of a single example in the end.
    make = c.coupled(c.simclr)
    act = c.training(count=count, evaluates=True)
    assert_exact(make, act, kt.TowerStrategy(2))


def test_queue_of_nearest_neighbours():
    assert_exact(c.coupled(c.nnclr), c.training(), kt.TowerStrategy(3))


@pytest.mark.parametrize(
    "by_hand, towers",
    long_but(
        ("clipped", 8).__ne__,
        [*((by_hand, 3) for by_hand in c.BY_HAND), ("clipped", 8)],
    ),
)
def test_gradients_by_hand(by_hand, towers):
    make = c.coupled(c.plain, c.BY_HAND[by_hand])
    assert_exact(make, c.training(), kt.TowerStrategy(towers))


VARIANTS = {
    "eager": ({"run_eagerly": True}, {}),
    "scaled": ({"scale": True}, {}),
    "scaled-loss": (
        {
            "scale": True,
            "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                m.momentum(), initial_scale=64.0
            ),
        },
        {},
    ),
    "each-updates": ({}, {"updates": "each"}),
    "on-the-towers": ({}, {"mode": "gpu"}),
    "steps-per-execution": ({"steps_per_execution": 2}, {}),
}


# With what gathers rows; and with what averages and reduces by hand, but for
# those that change only where, or how often, the same graph runs.
@pytest.mark.parametrize(
    "loss, by_hand, variant",
    long_but(
        lambda case: case[0] is c.simclr or case[2] == "scaled-loss",
        [
            *((c.simclr, c.as_they_are, variant) for variant in VARIANTS),
            *(
                (c.masked_mean, c.clipped, variant)
                for variant in ("eager", "scaled", "scaled-loss")
            ),
        ],
    ),
)
def test_variants(loss, by_hand, variant):
    options, given = VARIANTS[variant]
    make = c.coupled(loss, by_hand, **options)
    assert_exact(make, c.training(epochs=1), kt.TowerStrategy(3, **given))


@pytest.mark.parametrize(
    "loss, by_hand",
    [
        (c.simclr, c.as_they_are),
        (c.penalty_on_a_mean, c.adaptive),
        (c.plain, c.sharpness_aware),
    ],
)
def test_weights_that_exist_once(loss, by_hand):
    strategy = kt.ParameterServerTowerStrategy(3)
    assert_exact(c.coupled(loss, by_hand), c.training(), strategy)


def test_towers_that_draw_batches_of_their_own():
    # Batches of 4, 4 and 2 in the end, on one device batches of 12.
    x, y = c.X[:22], c.Y[:22]

    def act(batch):
        return lambda model: (
            model.fit(x, y, batch_size=batch, shuffle=False, verbose=0).history[
                "norm"
            ],
            model.predict(x, batch_size=5, verbose=0),
        )

    assert_exact(
        c.coupled(c.simclr, c.clipped),
        act(4),
        kt.TowerStrategy(3, batches="each"),
        reference=act(12),
    )


def test_in_keras_own_step_on_single_batches():
    """In a layer and in a loss, with ``train_on_batch``."""

    class Competing(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * tf.reduce_sum(kt.mean(x, axis=0) ** 2))
            return x - 0.5 * kt.mean(x, axis=0)

    def loss(y, prediction):
        y, z = kt.gather((y, prediction))
        pairs = tf.matmul(z, z, transpose_b=True)
        same = tf.cast(y == tf.transpose(y), tf.float32)
        return tf.reduce_mean((tf.tanh(pairs) - same) ** 2)

    def make():
        model = m.mlp(Competing())
        model.compile(m.momentum(global_clipnorm=0.1), loss)
        return model

    def act(model):
        y = c.Y[:, None]
        first = model.train_on_batch(c.X[:8], y[:8])
        second = model.train_on_batch(c.X[8:10], y[8:10])
        tested = model.test_on_batch(c.X[:7], y[:7])
        predicted = model.predict_on_batch(c.X[:7])
        return first, second, tested, predicted

    assert_exact(make, act, kt.TowerStrategy(3))


def test_sparse_gradients_by_hand():
    class Clipping(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = m.with_embedding()

        def call(self, x):
            return self.body(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(
                        y, self(x, training=True), from_logits=True
                    )
                )
            variables = self.trainable_variables
            grads = tape.gradient(loss, variables)
            assert isinstance(grads[0], tf.IndexedSlices)
            grads, norm = kt.clip_by_global_norm(grads, 0.05)
            assert isinstance(grads[0], tf.IndexedSlices)
            self.optimizer.apply(grads, variables)
            return {"norm": norm}

    def make():
        model = Clipping()
        model.build((None, 4))
        model.compile(m.momentum())
        return model

    def act(model):
        return model.fit(
            m.TOKENS[: c.EXAMPLES], c.Y, batch_size=8, shuffle=False, verbose=0
        ).history

    assert_exact(make, act, kt.TowerStrategy(3))


class Summing(c.Coupled):
    """Its loss is a sum over the examples, clipped by hand."""

    def __init__(self):
        def loss(model, x, y):
            z = model.unit(x)
            rows = kt.gather(z)
            return 0.1 * tf.reduce_sum(tf.matmul(z, rows, transpose_b=True))

        super().__init__(loss, c.clipped)


def test_sums():
    def make():
        keras.utils.set_random_seed(1)
        model = Summing()
        model.build((None, 6))
        model.compile(m.momentum())
        return model

    def act(model):
        c.training()(model)  # the log of a sum is not that of one device

    assert_exact(make, act, kt.TowerStrategy(3, average=False))


def test_half_precision():
    def loss(model, x, y):
        # As mixed precision computes it.
        z = tf.cast(model.unit(x), tf.float16)
        rows = tf.cast(kt.gather(z), tf.float32)
        many = kt.mean(tf.ones((3000, 1), tf.float16) * z[:1, :1])
        assert many.dtype == tf.float16
        return tf.reduce_mean(rows**4) + 0.1 * tf.cast(many, tf.float32)

    make = c.coupled(loss)
    strategy = kt.TowerStrategy(2)
    assert_exact(make, c.training(1, 2), strategy, tolerance=2e-3)


def _on_towers(towers, fn, *batch, **options):
    """Run a function in a step of each tower; returns the results."""
    seen = {}

    class Running(keras.Model):
        def __init__(self):
            super().__init__()
            self.bias = self.add_weight(shape=(), name="bias")

        def call(self, x):
            return x

        def train_step(self, data):
            seen[kt.current_tower().index] = tf.nest.map_structure(
                lambda t: t.numpy(),
                fn(*(part for part in data if part is not None)),
            )
            return {"loss": self.bias * 1.0}

    model = Running()
    model.build((None, 1))
    model.compile(run_eagerly=True)
    with kt.TowerStrategy(towers, **options):
        model.train_on_batch(*batch)
    return [seen[index] for index in range(towers)]


@pytest.mark.parametrize("count", [9, 7, 2])
def test_every_tower_gets_all_rows_in_order(count):
    x = np.arange(2 * count, dtype="float32").reshape(count, 2)
    y = np.array([f"row {index}" for index in range(count)])

    def fn(x, y):
        return kt.gather(
            {
                "x": x,
                "y": (y, x[:, 0] > 2),
                "twice": tf.repeat(tf.cast(x, tf.int32), 2, 0),
                "double": tf.cast(x, tf.float64),
                "complex": tf.complex(x, -x),
            }
        )

    for found in _on_towers(4, fn, x, y):
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["y"][0].astype(str), y)
        np.testing.assert_array_equal(found["y"][1], x[:, 0] > 2)
        np.testing.assert_array_equal(found["twice"], np.repeat(x, 2, 0))
        np.testing.assert_array_equal(found["double"], x)
        np.testing.assert_array_equal(found["complex"], x - 1j * x)


def test_rows_that_a_tower_selects():
    x = np.arange(8, dtype="float32")[:, None]
    y = np.array([1, 0, 0, 0, 1, 1, 1, 0])

    def fn(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = kt.gather(tf.boolean_mask(x, y > 0))
            loss = tf.reduce_sum(rows**2)
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

    def fn(x, mask):
        return (
            kt.mean(x),
            kt.mean(x, mask),
            kt.mean(x, mask > 0, axis=0),
            kt.mean(x, x > 3.0),
            kt.mean(x, tf.zeros_like(x)),
            kt.mean(tf.cast(x, tf.int64), axis=(0, 1)),
            kt.mean(x > 3.0),
        )

    chosen = values[mask > 0]
    wanted = (
        values.mean(),
        chosen.mean(),
        chosen.mean(0),
        values[values > 3].mean(),
        0.0,
        values.mean(),
        (values > 3).mean(),
    )
    on_one_device = [t.numpy() for t in fn(values, mask)]
    for found in (on_one_device, *_on_towers(3, fn, values, mask)):
        for mine, value in zip(found, wanted, strict=True):
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


REFUSED = {
    "kt.gather.*scalar|shape \\(\\)": lambda x: kt.gather(tf.reduce_sum(x)),
    "kt.gather.*RaggedTensor: make it dense": lambda x: kt.gather(
        tf.RaggedTensor.from_tensor(x)
    ),
    "kt.mean.*known number": lambda x: kt.mean(tf.reduce_sum(x)),
    "kt.mean.*axis=1.*axis 0": lambda x: kt.mean(x, axis=1),
    "kt.mean.*leading dimensions": lambda x: kt.mean(x[:, 0], x),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(kt.TowerError, match=message):
        _on_towers(2, lambda x: REFUSED[message](x), c.X[:8])


def test_reduced_gradients_that_would_count_for_each_tower():
    make = c.coupled(c.plain, c.signs)
    with (
        pytest.raises(kt.TowerError, match="average=False.*clip_by_global"),
        kt.TowerStrategy(2, average=False),
    ):
        c.training()(make())


def test_gradients_that_only_some_towers_have():
    def fn(x):
        mine = x if kt.current_tower().index else None
        return kt.clip_by_global_norm([x, mine], 1.0)

    with pytest.raises(kt.TowerError, match="gradient 1"):
        _on_towers(2, fn, c.X[:8])


def test_custom_training_loop():
    """Losses of towers are added up there, as TensorFlow's guides do."""
    reference, model = c.coupled(c.simclr)(), c.coupled(c.simclr)()
    for own in (reference, model):
        own.optimizer.build(own.trainable_variables)

    def step(model, x, parts):
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = c.simclr(model, x, None) / parts
        grads = tape.gradient(loss, variables)
        grads, norm = kt.clip_by_global_norm(grads, 0.1)
        model.optimizer.apply(grads, variables)
        return norm

    wanted = [step(reference, c.X[i : i + 8], 1) for i in (0, 8)]
    strategy = kt.TowerStrategy(2)
    with strategy:
        strategy.adopt(model)

        @tf.function
        def on_towers(x):
            parts = strategy.experimental_distribute_values_from_function(
                lambda context: x[
                    4 * context.replica_id_in_sync_group : 4
                    * context.replica_id_in_sync_group
                    + 4
                ]
            )
            return strategy.run(step, (model, parts, 2))

        for start, norm in zip((0, 8), wanted, strict=True):
            norms = on_towers(tf.constant(c.X[start : start + 8]))
            for mine in strategy.experimental_local_results(norms):
                close(mine, norm)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy())


def test_other_strategies_are_refused():
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(kt.TowerError, match="MirroredStrategy"):
        stock.run(lambda: kt.gather(tf.ones((2, 1))))
