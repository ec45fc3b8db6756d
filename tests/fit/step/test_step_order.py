"""The order of steps, and of their exchanges with other ranks."""

import pytest
import tensorflow as tf

from keras_towers.fit.data.batches import TowerBatch
from keras_towers.fit.step.step_order import StepOrder
from keras_towers.transport import SingleProcess


class Counting(SingleProcess):
    """Counts the exchanges with another rank, which says the same."""

    size = 2

    def __init__(self):
        self.begun = tf.Variable(0)

    def all_reduce(self, tensors, key):
        with tf.control_dependencies(tensors):
            self.begun.assign_add(1)
        return [2 * tensor for tensor in tensors]


def test_no_exchange_begins_without_a_batch():
    """The end of data would cancel it, and the other ranks would hang."""
    transport, data = Counting(), iter(tf.data.Dataset.from_tensors(1.0))
    order = StepOrder(transport)

    @tf.function
    def step():
        batch = order.begin_step(TowerBatch((next(data),)))
        with order.in_turn():
            order.reduce(["w"], [list(batch.pieces)], lambda rows: rows)
        return order.end_step(batch.pieces)

    step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    assert transport.begun.numpy() == 1


def test_nothing_counts_as_compared_before_the_ranks_compare():
    with pytest.raises(RuntimeError, match="compare"):
        StepOrder(SingleProcess()).once_compared(lambda: None)
