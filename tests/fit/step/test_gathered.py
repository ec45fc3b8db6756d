"""Gathering what has been gathered, and what is computed from it."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import coupled as c
from tests.kit.compare import assert_exact

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
    count = rows.shape[0] or tf.shape(rows)[0]
    logits = tf.matmul(rows, rows, transpose_b=True)
    without_the_diagonal = logits * (1 - tf.eye(count))
    return _weighted(kt.gather(logits) + kt.gather(without_the_diagonal))


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
    rows = kt.gather(tf.concat([z, z + 0.2], 0))
    count = tf.shape(rows)[0] // 2
    return _entropy(rows, tf.roll(tf.range(2 * count), count, 0))


def in_a_structure(z, y):
    first = kt.gather({"z": z, "y": y})
    both = kt.gather((tf.tanh(first["z"]), first["y"], tf.tanh(z), y))
    same = tf.cast(both[1] == both[3], tf.float32)
    return _weighted((both[0] - 2 * both[2]) * same[:, None])


LOSSES = (
    *(twice, itself, logits_of_all, selected, means, in_a_conditional, centred),
    *(own_logits, own_selected, several_for_each, views, in_a_structure),
)


def _making(*losses, **options):
    """A model whose loss is the sum of some."""

    def total(model, x, y):
        z = model.body(x)
        return tf.add_n([loss(z, y) for loss in losses])

    return c.coupled(total, **options)


def _single_batch(model):
    return model.train_on_batch(c.X[:7], c.Y[:7])


# Of any number of rows, where the last batch has one example, none for a second
# tower; and of static shapes.
@pytest.mark.parametrize("act", [c.training(17), _single_batch])
def test_exact(act):
    assert_exact(_making(*LOSSES), act, kt.TowerStrategy(2))


def dropped(z, y):
    rows = keras.random.dropout(kt.gather(z), 0.4, seed=3)
    return _weighted(rows) + _weighted(kt.gather(rows))


def noisy(z, y):
    rows = kt.gather(z)
    noise = keras.random.normal(keras.ops.shape(rows), seed=3)
    own = keras.random.normal(keras.ops.shape(z), seed=4)
    return _weighted(rows + noise) + _weighted(kt.gather(z + own) - rows)


def test_with_hidden_shapes_and_draws_for_gathered_rows():
    make = _making(twice, views, dropped, noisy)
    assert_exact(make, c.training(17), kt.TowerStrategy(2, exact=True))


REFUSED = [
    (lambda z: tf.matmul(z, z, transpose_b=True), True, "each pair.*gather"),
    (
        lambda z: tf.matmul(kt.gather(z), tf.tanh(z), transpose_b=True),
        *(False, "each pair"),
    ),
    *(
        (
            lambda z: tf.concat([kt.gather(z), z], 0),
            *(in_fit, "not known.*join afterwards"),
        )
        for in_fit in (True, False)
    ),
    (
        # Of an origin that is not known.
        lambda z: tf.reduce_mean(kt.gather(z)) * tf.ones([z.shape[0], 2]),
        *(False, "from tf.shape"),
    ),
]


@pytest.mark.parametrize("given, in_fit, message", REFUSED)
def test_refused(given, in_fit, message):
    model = _making(lambda z, y: tf.reduce_mean(kt.gather(given(z))))()
    act = c.training() if in_fit else _single_batch
    with pytest.raises(kt.TowerError, match=message), kt.TowerStrategy(2):
        act(model)


def test_eagerly_what_is_not_known_for_sure_is_said_or_refused(logged):
    make = _making(itself, centred, run_eagerly=True)
    assert_exact(make, _single_batch, kt.TowerStrategy(2))
    with kt.TowerStrategy(2):
        _single_batch(_making(views, run_eagerly=True)())
    assert logged("gathered again") and logged("tf.concat")
    # The rows of the global batch, unless they are what was gathered itself.
    with (
        pytest.raises(kt.TowerError, match="7 rows.*run_eagerly"),
        kt.TowerStrategy(2),
    ):
        _single_batch(_making(twice, run_eagerly=True)())
