"""Gathering what has been gathered, and what is computed from it."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import told
from tests.exactness import coupled as c
from tests.exactness import models as m
from tests.kit.compare import assert_exact, close
from tests.kit.long import long_but

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def _entropy(z, labels):
    logits = tf.matmul(z, z, transpose_b=True)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def _weighted(values):
    """Depends on how many rows there are, and on their order."""
    places = tf.cast(tf.range(tf.size(values)), values.dtype)
    values = tf.tanh(tf.reshape(values, [-1]))
    return tf.reduce_mean(values * (0.1 + 0.01 * places))


def twice(z, y):
    rows = kt.gather(tf.math.l2_normalize(kt.gather(z), 1))
    return _entropy(rows, tf.range(tf.shape(rows)[0]))


def itself(z, y):
    rows = kt.gather(z)
    return _weighted(kt.gather(rows)) + _weighted(rows)


def logits_of_all(z, y):
    rows = kt.gather(z)
    return _weighted(kt.gather(tf.matmul(rows, rows, transpose_b=True)))


def without_the_diagonal(z, y):
    rows = kt.gather(z)
    count = rows.shape[0] or tf.shape(rows)[0]
    logits = tf.matmul(rows, rows, transpose_b=True) * (1 - tf.eye(count))
    return _weighted(kt.gather(logits))


def selected(z, y):
    rows = kt.gather(z)
    return _weighted(kt.gather(tf.boolean_mask(rows, rows[:, 0] > 0)))


def in_a_conditional(z, y):
    rows = kt.gather(z)
    positive = tf.reduce_sum(rows) > 0
    return _weighted(
        kt.gather(tf.cond(positive, lambda: rows, lambda: 2 * rows))
    )


def means(z, y):
    """The same on all towers, without rows."""
    rows = kt.gather(z)
    usage = kt.gather(kt.mean(z, axis=0))
    return _weighted(usage + kt.gather(tf.reduce_mean(rows, 0)[None]))


def centred(z, y):
    """Own rows, which depend on gathered ones."""
    rows = kt.gather(z)
    return _weighted(kt.gather(z - tf.reduce_mean(rows, 0)) + rows)


def own_logits(z, y):
    return _weighted(kt.gather(tf.matmul(z, kt.gather(z), transpose_b=True)))


def own_selected(z, y):
    mean = tf.reduce_mean(kt.gather(z))
    return _weighted(kt.gather(tf.boolean_mask(z, z[:, 0] > mean)))


def several_for_each(z, y):
    z -= tf.reduce_mean(kt.gather(z), 0)
    return _weighted(kt.gather(tf.repeat(z, 2, 0)))


def views(z, y):
    """All examples of one view come before those of the other."""
    z -= tf.reduce_mean(kt.gather(z), 0)
    rows = kt.gather(tf.concat([z, z + 0.2], 0))
    count = tf.shape(rows)[0] // 2
    return _entropy(rows, tf.roll(tf.range(2 * count), count, 0))


def first_views(z, y):
    rows = kt.gather(tf.concat([z, z + 0.2], 0))
    count = tf.shape(rows)[0] // 2
    return _entropy(rows, tf.roll(tf.range(2 * count), count, 0))


def in_a_structure(z, y):
    first = kt.gather({"z": z, "y": y})
    both = kt.gather((tf.tanh(first["z"]), first["y"], tf.tanh(z), y))
    same = tf.cast(both[1] == both[3], tf.float32)
    return _weighted((both[0] - 2 * both[2]) * same[:, None])


LOSSES = (
    *(twice, itself, logits_of_all, without_the_diagonal, selected, means),
    *(in_a_conditional, centred, own_logits, own_selected, several_for_each),
    *(views, first_views, in_a_structure),
)


def _making(loss, **options):
    return c.coupled(lambda model, x, y: loss(model.body(x), y), **options)


@pytest.mark.parametrize(
    "loss, towers",
    long_but(
        lambda case: case[0] in (twice, centred, views) or case[1] == 3,
        [(loss, towers) for loss in LOSSES for towers in (2, 3)],
    ),
)
def test_of_any_number_of_rows(loss, towers):
    assert_exact(_making(loss), c.training(), kt.TowerStrategy(towers))


def _single_batches(model):
    y = c.Y[:8]
    return [
        model.train_on_batch(c.X[:count], y[:count]) for count in (8, 7, 8, 1)
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_of_static_shapes(loss):
    assert_exact(_making(loss), _single_batches, kt.TowerStrategy(2))


@pytest.mark.parametrize("loss", [twice, views])
def test_with_hidden_shapes(loss):
    assert_exact(
        _making(loss), _single_batches, kt.TowerStrategy(3, exact=True)
    )


def dropped(z, y):
    rows = keras.random.dropout(kt.gather(z), 0.4, seed=3)
    return _weighted(rows) + _weighted(kt.gather(rows))


def noisy(z, y):
    rows = kt.gather(z)
    noise = keras.random.normal(keras.ops.shape(rows), seed=3)
    own = keras.random.normal(keras.ops.shape(z), seed=4)
    return _weighted(rows + noise) + _weighted(kt.gather(z + own) - rows)


@pytest.mark.parametrize("act", [c.training(), _single_batches])
@pytest.mark.parametrize("loss", [dropped, noisy])
def test_draws_for_gathered_rows(loss, act):
    assert_exact(_making(loss), act, kt.TowerStrategy(2, exact=True))


def _pairs(z, y):
    return kt.gather(tf.matmul(z, z, transpose_b=True))


def _joined(z, y):
    return kt.gather(tf.concat([kt.gather(z), z], 0))


def _others(z, y):
    return kt.gather(tf.matmul(kt.gather(z), tf.tanh(z), transpose_b=True))


@pytest.mark.parametrize("act", [c.training(), _single_batches])
@pytest.mark.parametrize(
    "given, message",
    [
        (_pairs, "each pair.*kt.gather\\(x\\)"),
        (_others, "each pair"),
        (_joined, "not known.*join afterwards"),
    ],
)
def test_refused(given, message, act):
    model = _making(lambda z, y: tf.reduce_mean(given(z, y)))()
    with pytest.raises(kt.TowerError, match=message), kt.TowerStrategy(2):
        act(model)


def test_static_rows_of_unknown_origin_are_refused():
    def loss(z, y):
        mean = tf.reduce_mean(kt.gather(z))
        return _weighted(kt.gather(mean * tf.ones([z.shape[0], 2])))

    with (
        pytest.raises(kt.TowerError, match="from tf.shape"),
        kt.TowerStrategy(2),
    ):
        _single_batches(_making(loss)())


@pytest.fixture
def warned(caplog, monkeypatch):
    """The warnings of a test, each of which is logged once in a process."""
    monkeypatch.setattr(told, "_said", set())
    return lambda: [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize("loss", [itself, centred])
def test_eagerly_what_is_known(loss, warned):
    make = _making(loss, run_eagerly=True)
    assert_exact(make, c.training(epochs=1), kt.TowerStrategy(2))
    if loss is centred:
        assert any("gathered again" in message for message in warned())


def test_eagerly_the_rows_of_the_global_batch_are_refused():
    model = _making(twice, run_eagerly=True)()
    with (
        pytest.raises(kt.TowerError, match="8 rows.*run_eagerly"),
        kt.TowerStrategy(2),
    ):
        _single_batches(model)


def test_eagerly_the_order_of_several_rows_is_said(warned):
    model = _making(first_views, run_eagerly=True)()
    with kt.TowerStrategy(2):
        _single_batches(model)
    assert any("tf.concat" in message for message in warned())


def test_in_a_custom_training_loop():
    reference, model = _making(twice)(), _making(twice)()
    for own in (reference, model):
        own.optimizer.build(own.trainable_variables)

    def step(model, x, parts):
        with tf.GradientTape() as tape:
            loss = twice(model.body(x), None) / parts
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    step(reference, c.X[:8], 1)
    strategy = kt.TowerStrategy(2)
    with strategy:
        strategy.adopt(model)

        @tf.function
        def on_towers(x):
            parts = strategy.experimental_distribute_values_from_function(
                lambda context: tf.split(x, 2)[context.replica_id_in_sync_group]
            )
            strategy.run(step, (model, parts, 2))

        on_towers(tf.constant(c.X[:8]))
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy())


def test_in_evaluation_and_keras_own_step():
    def loss(y, z):
        rows = kt.gather(z)
        return _weighted(kt.gather(tf.tanh(rows)))

    def make():
        model = m.mlp()
        model.compile(m.momentum(), loss)
        return model

    def act(model):
        y = c.Y[:, None]
        history = model.fit(c.X, y, batch_size=8, shuffle=False, verbose=0)
        return history.history, model.evaluate(c.X, y, 8, verbose=0)

    assert_exact(make, act, kt.TowerStrategy(3))
