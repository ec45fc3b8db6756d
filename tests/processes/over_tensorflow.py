"""Checks of a worker: TensorFlow's collectives themselves, on two ranks."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.reports.step_reports import planned_memory
from keras_towers.foundation import system
from keras_towers.inspection.bench.cell_process import (
    peak_memory,
    reset_peak_memory,
)
from tests.kit.ranks import check
from tests.processes.small import RANK, Strategy, fit, gather, model, refused

DTYPES = (
    *(tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32),
    *(tf.int64, tf.uint64, tf.float16, tf.bfloat16, tf.float32, tf.float64),
    tf.complex64,
)
# BytePS sums words of 32 bits, whatever they stand for.
SENT = DTYPES[::3] if Strategy is kt.BytePSStrategy else DTYPES


def transport():
    return Strategy()._config.transport


def assert_is(found, wanted, dtype):
    assert found.dtype == dtype
    wanted = tf.cast(tf.constant(wanted), dtype)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())


@check
def dtypes_of_collectives():
    over = transport()
    for dtype in SENT:

        def own(*values, dtype=dtype):
            return tf.cast(tf.constant(values), dtype)

        found = over.all_gather(own(*[RANK] * (RANK + 1)), "gather")
        assert_is(found, [0, 1, 1], dtype)
        found = over.all_to_all(own(RANK, 1 - RANK), "swap")
        assert_is(found, [[0, 1], [1, 0]][RANK], dtype)
        (found,) = over.broadcast([own(RANK, 1)], "broadcast", root=1)
        assert_is(found, [1, 1], dtype)
        (found,) = over.all_reduce([own(RANK, 0)], "sum")
        assert_is(found, [1, 0], dtype)


@check
def a_process_has_the_memory_that_is_planned():
    width = 2048
    # Of fewer rows no gradients are exchanged.
    x = np.zeros((640, width), "float32")
    with Strategy(towers=1, weights="sharded") as strategy:
        # What a process has with any model.
        fit(model())
        system.return_freed_memory()
        before = reset_peak_memory()
        keras.utils.set_random_seed(0)
        dense = [keras.layers.Dense(width, "tanh") for _ in range(8)]
        wide = keras.Sequential([keras.Input((width,)), *dense])
        wide.compile("adam", "mse", jit_compile=False)
        wide.fit(x, x, batch_size=320, verbose=0)
        measured = 1e6 * (peak_memory() - before)
        planned = planned_memory(strategy)
    assert planned["messages between ranks"] > 2**24
    assert 0.8 < measured / sum(planned.values()) < 1.25, (measured, planned)


@check
def rows_that_all_ranks_know_are_scattered_and_gathered():
    """Evenly, and so that the first rank has none, or the last."""
    over = transport()
    ranks = range(over.size)
    shares = [2] * over.size, [2 * r for r in ranks], [*ranks][::-1]

    def numbers(counts):
        return tf.reshape(tf.range(2 * sum(counts)) % 2, [-1, 2])

    def both(dtype, counts):
        given = tf.cast(numbers(counts), dtype)
        mine = given if RANK else tf.zeros_like(given)
        own = tf.split(given, counts)[RANK]
        key = "-".join(map(str, [dtype.name, *counts]))
        part = over.reduce_scatter(mine, counts, f"part.{key}")
        return part, over.all_gather(own, f"whole.{key}", counts)

    cases = [*itertools.product(SENT, shares)]

    def every():
        found = [()]
        for case in cases:
            # In the same order on all ranks.
            with tf.control_dependencies(found[-1]):
                found.append(both(*case))
        return found[1:]

    for run in (every, tf.function(every)):
        for (dtype, counts), (part, whole) in zip(cases, run(), strict=True):
            wanted = tf.split(numbers(counts) * (over.size - 1), counts)[RANK]
            assert_is(part, wanted, dtype)
            assert_is(whole, numbers(counts), dtype)
    nothing = over.reduce_scatter(tf.zeros([0, 3]), [0] * over.size, "nothing")
    assert nothing.shape == (0, 3)


@check
def strings_are_gathered_only():
    over = transport()
    found = over.all_gather(tf.constant([["a", ""], ["ü", "bc"]]), "strings")
    assert found.numpy().tolist() == 2 * [[b"a", b""], ["ü".encode(), b"bc"]]
    with refused("string", "cannot be sent"):
        over.all_to_all(tf.constant(["a", "b"]), "strings")


@check
def shapes_that_differ_between_calls_and_ranks():
    over = transport()

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def collected(x):
        return over.all_gather(x, "rows")

    for rows in (1, 0, 7, 300, 2):
        mine = tf.fill([rows * RANK, 2], 1.0)
        assert collected(mine).shape == over.all_gather(mine, "eager").shape
        assert collected(mine).shape == (rows, 2)
    empty = over.all_reduce([tf.zeros([0, 3]), tf.ones([])], "empty")
    assert [t.shape for t in empty] == [(0, 3), ()]
    for length in (3, 5):
        (total,) = over.all_reduce([tf.ones([length])], "another")
        assert total.numpy().tolist() == [2.0] * length
    for unlike in (
        tf.ones([2, 2 + RANK]),
        tf.ones([2], (tf.int32, tf.int64)[RANK]),
        tf.ones([2] * (1 + RANK)),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="differ"):
            over.all_gather(unlike, "unlike")

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([])])
    def summed(x, y):
        return over.all_reduce([x, y], "of any size")

    for rows in (2, 0, 5):
        total, one = summed(tf.fill([rows, 2], 1.0 + RANK), 1.0)
        assert total.numpy().tolist() == [[3.0, 3.0]] * rows
        assert one.numpy() == 2.0

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def sent(x):
        return over.broadcast([x], "any")[0], over.all_to_all(x, "exchange")

    for rows in (2, 0, 4):
        first, swapped = sent(tf.fill([rows], 1.0 + RANK))
        assert first.numpy().tolist() == [1.0] * rows
        assert swapped.numpy().tolist() == [1.0] * (rows // 2) + [2.0] * (
            rows // 2
        )
    # They have not harmed what comes next.
    assert gather(RANK) == [0, 1]


@check
def collectives_run_at_once_in_any_order():
    over = transport()
    many = list(range(60))

    @tf.function
    def sums(x):
        order = many[::-1] if RANK else many
        found = {i: over.all_reduce([x * i], f"sum.{i}")[0] for i in order}
        return [found[i] for i in many]

    @tf.function
    def repeated(x):
        for _ in tf.range(5):
            (x,) = over.all_reduce([x], "repeated")
        return x

    for _ in range(3):
        totals = sums(tf.ones([3]))
        assert [t.numpy().tolist() for t in totals] == [
            [2.0 * i] * 3 for i in many
        ]
    assert repeated(tf.ones([])).numpy() == 2.0**5


@check
def a_large_sum_and_many_small_ones():
    over = transport()
    sizes = [1_100_000, 5, 0, 70_000, 1]
    for dtype, tolerance in ((tf.float32, 1e-6), (tf.bfloat16, 1e-2)):
        ranks = [
            [
                tf.cast(tf.random.stateless_uniform([size], [i, rank]), dtype)
                for i, size in enumerate(sizes)
            ]
            for rank in (0, 1)
        ]
        totals = over.all_reduce(ranks[RANK], "large")
        for *parts, total in zip(*ranks, totals, strict=True):
            assert total.dtype == dtype
            wanted = tf.add_n([tf.cast(part, tf.float32) for part in parts])
            found = tf.cast(total, tf.float32)
            np.testing.assert_allclose(found, wanted, rtol=tolerance)


@check
def towers_alone_work_in_the_same_process():
    mine = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    mine.compile("sgd", "mse")
    with kt.TowerStrategy(["/cpu:0"]):
        mine.fit(np.ones((4, 2)), np.ones((4, 1)) * RANK, verbose=0)
    first, second = gather(mine.get_weights()[1].tolist())
    assert first != second
