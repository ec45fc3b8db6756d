"""Checks of a worker: BytePS as a transport, on two ranks."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers.transport.byteps import BytePSTransport
from tests.kit.ranks import check
from tests.processes.small import refused

NAN = float("nan")


@check
def many_rounds_of_one_name():
    """A server overwrites sums that a slower worker has not pulled."""
    transport = BytePSTransport()
    rank, ranks = transport.rank, transport.size

    @tf.function
    def rounds(number):
        wrong = 0
        for i in tf.range(number):
            mine = tf.fill([1000], tf.cast(10 * i + rank, tf.float32))
            (total,) = transport.all_reduce([mine], "rounds")
            wanted = tf.cast(ranks * 10 * i + sum(range(ranks)), tf.float32)
            wrong += tf.cast(tf.reduce_any(total != wanted), tf.int32)
        return wrong

    assert rounds(tf.constant(150)) == 0


@check
def sums_of_every_dtype():
    transport = BytePSTransport()
    dtypes = (
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool),
        *(tf.int8, tf.uint8, tf.int32, tf.uint32, tf.int64, tf.uint64),
    )
    tensors = [tf.cast([[1, 0], [3, 4]], dtype) for dtype in dtypes]
    tensors += [tf.zeros([0, 3]), tf.constant(2.5)]
    for _ in range(3):
        sums = transport.all_reduce(tensors, "dtypes")
        for tensor, total in zip(tensors, sums, strict=True):
            assert total.dtype == tensor.dtype
            if tensor.dtype == tf.bool:
                wanted = tensor
            else:
                wanted = tensor * tf.cast(transport.size, tensor.dtype)
            np.testing.assert_array_equal(total, wanted)


@check
def a_constant_is_summed_at_every_call():
    transport = BytePSTransport()

    @tf.function
    def constant():
        return transport.all_reduce([tf.constant([1.0, 2.0])], "constant")[0]

    for _ in range(4):
        np.testing.assert_array_equal(constant(), [2.0, 4.0])


@check
def sums_of_unknown_length():
    transport = BytePSTransport()

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def total(tensor):
        return transport.all_reduce([tensor], "unknown")[0]

    # More than one message, whole messages, less than one, nothing.
    for rows in (500_000, 2**20, 5, 0, 5):
        tensor = tf.random.stateless_uniform([rows, 3], [1, rows])
        np.testing.assert_array_equal(total(tensor), 2 * tensor)


@check
def gathered_as_sent():
    transport = BytePSTransport()
    rank = transport.rank
    for dtype in (tf.bool, tf.float16, tf.float32, tf.int64, tf.complex64):
        for rows in ((1, 2), (0, 3), (2, 0), (0, 0)):
            mine = tf.cast(tf.fill([rows[rank], 2], rank + 1), dtype)
            every = transport.all_gather(mine, f"gather.{dtype.name}")
            wanted = [[r + 1] * 2 for r in range(2) for _ in range(rows[r])]
            assert every.dtype == dtype
            np.testing.assert_array_equal(
                every, np.reshape(wanted, [-1, 2]).astype(dtype.as_numpy_dtype)
            )
    received = transport.all_to_all(tf.range(4) + 10 * rank, "exchange")
    first = 2 * rank
    assert list(received.numpy()) == [
        *(first, first + 1, first + 10, first + 11)
    ]


@check
def a_broadcast_keeps_nan_out_and_bits_as_they_are():
    transport = BytePSTransport()
    root = [tf.constant([-0.0, NAN, 1.0]), tf.constant(7), tf.zeros([0])]
    others = [tf.constant([NAN, 2.0, NAN]), tf.constant(8), tf.zeros([0])]
    for which in range(transport.size):
        mine = root if transport.rank == which else others
        got = transport.broadcast(mine, "broadcast", root=which)
        for value, wanted in zip(got, root, strict=True):
            assert value.numpy().tobytes() == wanted.numpy().tobytes()


@check
def ranks_that_sum_different_tensors_are_told():
    transport = BytePSTransport()
    with refused("do not sum the same tensors", "float32/2", "float32/3"):
        transport.all_reduce([tf.ones([2 + transport.rank])], "different")
    # And go on.
    assert transport.gather_objects(transport.rank) == [0, 1]


@check
def only_data_is_sent():
    transport = BytePSTransport()
    with refused("cannot be sent to other ranks"):
        transport.gather_objects(object())


@check
def the_engine_for_code_of_ones_own():
    strategy = kt.BytePSStrategy()
    engine = strategy.engine
    assert (engine.rank(), engine.size()) == (strategy.rank, 2)
    assert engine.module.__name__ == "byteps.tensorflow"
    assert engine.push_pull is engine.module.push_pull
    assert not engine.mpi_enabled() and not strategy.mpi_enabled()
    assert strategy.local_size == 2 and strategy.local_rank == strategy.rank
