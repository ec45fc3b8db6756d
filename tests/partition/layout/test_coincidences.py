"""A static number of examples that other sizes equal by coincidence."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.program import depends_on_batch
from tests.partition import kit
from tests.partition.kit import check_divided, replicated

N = 32
TOWERS = ((20, 12), (0, 32), (12, 0, 20))
_SEED = (1, 2)


def _rows(*shape, examples=N):
    return kit.sharded(-1, *shape, examples=examples)


def _scanned(x, w):
    """Its gradients are accumulated from zeros that are as long as a batch."""

    def scan(y, _):
        return tf.tanh(y @ w)

    return tf.scan(scan, tf.range(3), initializer=x)


def _masked(x, w):
    """A mask of as many steps as there are examples."""
    steps = tf.shape(w)[0]
    mask = tf.linalg.band_part(tf.fill([steps, steps], 1.0), -1, 0)
    return tf.nn.softmax(x[:, :, None] * x[:, None, :] + mask) @ w


def _noisy_weight(x, w):
    return x @ (w + tf.random.stateless_normal(tf.shape(w), _SEED)) / N


def _noisy(x, w):
    """Noise for each example, which is cast, moved and broadcast."""
    noise = tf.random.stateless_uniform([tf.shape(x)[0], 1], _SEED)
    kept = tf.cast(tf.reshape(noise, [-1, 1]) > 0.5, tf.float32)
    steps = tf.tile(tf.ones([1, N]), [tf.shape(x)[0], 1])
    return x * tf.broadcast_to(kept, tf.shape(x)) @ w + steps


def _joined(x, w):
    """As true and false examples of a discriminator."""
    n = tf.shape(x)[0]
    labels = tf.concat([tf.ones([n, 1]), tf.zeros([n, 1])], 0)
    return tf.concat([tf.sin(x) @ w, x @ w], 0) * labels


STEPS = {
    step.__name__: kit.with_gradients(step)
    for step in (_scanned, _masked, _noisy_weight, _noisy, _joined)
}


@pytest.mark.parametrize("name", STEPS)
def test_a_size_that_is_that_of_the_batch_changes_nothing(name):
    """Towers exchange what they do for another batch, and as much."""
    step, weight = STEPS[name], replicated(N, N)
    program = check_divided(step, _rows(N), weight, towers=TOWERS)
    towers = [(*counts, 1) for counts in TOWERS]
    other = check_divided(step, _rows(N, examples=N + 1), weight, towers=towers)
    assert kit.exchange_counts(program) == kit.exchange_counts(other)
    gradients = [e for e in program.exchanges if e.kind == "sum"]
    assert [e.given.shape for e in gradients] == [(N, N)]


def _generated(x, w):
    """Examples of a generator."""
    made = tf.random.stateless_uniform([tf.shape(x)[0], 64], _SEED)
    for _ in range(4):
        made = tf.tanh(made @ w / 8)
    return tf.reduce_mean(made), tf.reduce_mean(x @ w, 0)


def _of_a_weight(x, w):
    noisy = w[:N] + tf.random.stateless_uniform([N, 64], _SEED)
    return tf.reduce_mean(x[:, :N] @ noisy, 0)


@pytest.mark.parametrize(
    ("step", "sharded"), [(_generated, True), (_of_a_weight, False)]
)
def test_the_cheaper_reading_of_how_many_are_drawn_wins(step, sharded):
    """What is made of random numbers only meets no rows of examples."""
    weight = replicated(64, 64)
    program = check_divided(step, _rows(64), weight, towers=TOWERS)
    drawn = [o for o in program.operations if "RandomUniform" in o.type]
    assert {depends_on_batch(o.outputs) for o in drawn} == {sharded}
    assert kit.exchange_counts(program).keys() == {"sum"}


def test_what_is_computed_once_may_be_as_long_as_a_batch():
    def step(x, w):
        _, upper = tf.linalg.qr(x)
        return tf.tanh(w @ upper)

    for examples, more in ((N, ()), (N + 1, (1,))):
        given = _rows(N, examples=examples), replicated(N, N)
        towers = [(*counts, *more) for counts in TOWERS]
        program = kit.check_on_towers(step, *given, towers=towers)
        assert kit.exchange_counts(program) == {"gather": 1}


def _each_by_itself(x, w):
    """Examples one by one, each in as many rounds as there are examples."""

    def rounds(row):
        steps = tf.scan(lambda y, s: tf.tanh(y + s), row, initializer=0.0)
        return tf.tensordot(steps, w, 1)

    return tf.map_fn(rounds, x)


def test_loops_in_a_loop_over_examples():
    for examples in (4, None):
        given = _rows(4, examples=examples), replicated(4, 4)
        step = kit.with_gradients(_each_by_itself)
        check_divided(step, *given, towers=((3, 0, 1),))


def test_no_tower_has_all_rows_of_what_is_made_for_them():
    """Such as the gradient of a mean, which is tiled twice."""

    def step(x, w):
        each = tf.reduce_mean((x @ w) ** 2, -1)
        return tf.gradients(tf.reduce_mean(each), w)

    program = check_divided(step, _rows(N), replicated(N, N), towers=TOWERS)
    made = [o for o in program.operations if o.type == "Tile"]
    assert made
    assert all(depends_on_batch(o.outputs) for o in made)
