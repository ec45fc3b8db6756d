"""Variables that a step uses besides, with the test as the other rank."""

import pytest
import tensorflow as tf

from keras_towers.fit.step.outside import OutsideVariables
from keras_towers.transport import SingleProcess

pytestmark = pytest.mark.core


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


@pytest.mark.parametrize("same", [True, False])
def test_variables_are_sent_once_an_epoch_if_they_differ(same):
    rank_0 = Rank0(same)
    outside = OutsideVariables(rank_0, ["CPU:0"] * 2)
    numbers = tf.Variable([1, 2]), tf.Variable(True)
    copies = tf.Variable([0.5] * 3), tf.Variable([0.5] * 3)
    handles = [[v.handle] for v in numbers] + [[c.handle for c in copies]]

    @tf.function
    def step():
        outside.take_over(handles)

    before = [variable.numpy().tolist() for variable in (*numbers, *copies)]
    after = before if same else [[7, 7], True, [7.0] * 3, [7.0] * 3]
    for epoch in 1, 2:
        outside.compare_in_next_step()
        step()
        step()
        assert rank_0.sent.numpy() == (0 if same else epoch)
        now = [variable.numpy().tolist() for variable in (*numbers, *copies)]
        assert now == after
