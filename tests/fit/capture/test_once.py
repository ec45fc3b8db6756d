"""What a step does besides computing happens once, or it is told."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_same, outcome
from tests.kit.training import fit
from tests.splitting.cases.table import apply, mse, numbers, stepped

X, Y = numbers()


def plain(model, x, y, factor=1.0):
    with tf.GradientTape() as tape:
        loss = mse(y, model(x, training=True)) * factor
    return apply(model, tape, loss)


def counting():
    """A Python function that counts its calls, as an operation."""
    calls = []

    def count(given):
        calls.append(given.tolist())
        return np.float32(len(calls))

    def called(given):
        number = tf.numpy_function(count, [given], tf.float32)
        number.set_shape([])
        return number

    return called, calls


def does_what_is_alike(path):
    """Calls Python, fills a queue, writes a table, and prints now and then."""
    called, calls = counting()
    queue = tf.queue.FIFOQueue(100, [tf.float32], [()])
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    keys = tf.constant([0, 1], tf.int64)

    def step(model, x, y):
        queue.enqueue(1.0)
        size = tf.cast(queue.size(), tf.float32)
        # What the examples find follows from when they look.
        own = tf.cast(x[:, 0] > 0, tf.int64)
        before = table.lookup(own)
        table.insert(keys, table.lookup(keys) + [1.0, 2.0])
        found = tf.ensure_shape(table.lookup(own) + before, [None])
        done = model.optimizer.iterations
        tf.cond(
            done.value % 2 == 0,
            lambda: tf.print(done.value, output_stream=f"file://{path}"),
            tf.no_op,
        )
        factor = 0.1 / size / called(1.0)
        logs = plain(model, x * found[:, None], y, factor)
        # Also after the update.
        called(2.0)
        return logs

    def happened():
        kept = table.lookup(keys).numpy().tolist()
        return calls, int(queue.size()), kept, path.read_text().split()

    return stepped(step), happened


def prints_its_loss(path):
    def step(model, x, y):
        logs = plain(model, x, y)
        tf.print(logs["loss"], output_stream=f"file://{path}")
        return logs

    def shown():
        return [round(float(loss), 4) for loss in path.read_text().split()]

    return stepped(step), shown


def sums_in_python(path):
    called, calls = counting()

    def step(model, x, y):
        return plain(model, x, y, 1 / called(x))

    return stepped(step), lambda: calls


def fitted(build, path, strategy=None):
    keras.utils.set_random_seed(0)
    model, happened = build(path)
    trained = functools.partial(fit, epochs=2, x=X, y=Y)
    return outcome(lambda: model, trained, strategy), happened()


def check(build, folder, strategy):
    wanted, seen = fitted(build, folder / "one")
    found, also = fitted(build, folder / "towers", strategy)
    assert also == seen
    assert_same(found, wanted)
    assert "proven to be that of one device" in strategy.describe()
    return seen


def test_what_is_alike_happens_once(tmp_path, logged):
    check(does_what_is_alike, tmp_path, kt.TowerStrategy(towers=3))
    assert not logged("step of")


@pytest.mark.parametrize(
    "build",
    [prints_its_loss, pytest.param(sums_in_python, marks=pytest.mark.long)],
)
def test_what_follows_from_examples(build, tmp_path, logged):
    """It is told; exact=True gives it those of all towers."""
    strategy = kt.TowerStrategy(towers=2)
    _, happened = fitted(build, tmp_path / "not exact", strategy)
    ((_, message),) = logged("has an effect")
    assert "test_once.py:" in message
    exact = kt.TowerStrategy(towers=2, exact=True)
    seen = check(build, tmp_path, exact)
    assert happened != seen


def test_what_cannot_be_taken_out_is_told(tmp_path, logged):
    """A branch that prints and writes a variable is each tower's own."""

    def step(model, x, y):
        def write():
            tf.print("written", output_stream=f"file://{tmp_path / 'out'}")
            model.kept.assign_add(1.0)
            return 0

        tf.cond(model.optimizer.iterations.value < 9, write, lambda: 0)
        return plain(model, x, y)

    model = stepped(step)
    model.kept = model.add_weight(shape=(), trainable=False)
    with kt.TowerStrategy(towers=2):
        model.train_on_batch(X, Y)
    assert (tmp_path / "out").read_text().split() == ["written"] * 2
    assert logged("PrintV2 happens once for every tower")
