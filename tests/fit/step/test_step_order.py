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


class Rank0(SingleProcess):
    """A transport to rank 0, whose variables are the same, or are 7."""

    size = 2

    def __init__(self, same):
        self.same = same
        self.sent = tf.Variable(0)

    def all_reduce(self, tensors, key):
        return [2 * t if self.same else 2 * t + 1 for t in tensors]

    def broadcast(self, tensors, key, root=0):
        self.sent.assign_add(1)
        return [tf.fill(tf.shape(t), tf.cast(7, t.dtype)) for t in tensors]


@pytest.mark.core
@pytest.mark.parametrize("same", [True, False])
def test_variables_are_sent_once_an_epoch_if_they_differ(same):
    rank_0 = Rank0(same)
    order = StepOrder(rank_0)
    numbers = tf.Variable([1, 2]), tf.Variable(True)
    copies = tf.Variable([0.5] * 3), tf.Variable([0.5] * 3)
    handles = [[v.handle] for v in numbers] + [[c.handle for c in copies]]

    def take_over():
        return order.agreement.take_over(handles, ["CPU:0"] * 2)

    @tf.function
    def step():
        order.in_first_step(take_over)
        return order.end_step(tf.zeros(()))

    before = [variable.numpy().tolist() for variable in (*numbers, *copies)]
    after = before if same else [[7, 7], True, [7.0] * 3, [7.0] * 3]
    for epoch in 1, 2:
        order.begin_epoch()
        step()
        step()
        assert rank_0.sent.numpy() == (0 if same else epoch)
        now = [variable.numpy().tolist() for variable in (*numbers, *copies)]
        assert now == after
