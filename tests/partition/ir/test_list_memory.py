"""Lists of a loop that have the same tensors in memory."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.effects import LOOPS
from keras_towers.partition.ir.list_memory import popped_lists, shared_lists
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.memory_estimate import MemoryEstimate
from tests.partition.kit import earliest, laid_out, sharded

ROUNDS, ROWS, WIDTH = 16, 8, 50


def recurrent(x, variable, number):
    """The gradient of a loop that writes each state, or only the last one."""
    given = tf.TensorArray(tf.float32, ROUNDS).unstack(x)
    found = tf.TensorArray(tf.float32, number, element_shape=[None, WIDTH])

    def act(k, h, found):
        h = tf.tanh(h @ variable + given.read(k) ** 2)
        return k + 1, h, found.write(k if number > 1 else 0, h)

    with tf.GradientTape() as tape:
        begin = 0, tf.zeros_like(x[0]), found
        *_, found = tf.while_loop(
            lambda k, h, found: k < ROUNDS,
            act,
            begin,
            maximum_iterations=ROUNDS,
        )
        loss = tf.reduce_sum(found.stack())
    return tape.gradient(loss, variable)


@pytest.mark.parametrize("number", [ROUNDS, 1])
def test_a_state_is_once_in_memory_whatever_lists_have_it(number):
    variable = tf.Variable(tf.ones([WIDTH, WIDTH]))
    program = laid_out(
        lambda x: recurrent(x, variable, number),
        sharded(ROUNDS, -1, WIDTH),
    )
    sizes, rows = TensorSizes(program, 2, ROWS), ROUNDS * ROWS * WIDTH * 4
    forward, backward = (o for o in program.operations if o.type in LOOPS)
    # The results of rounds, which are the states of the next ones, too.
    wide = [t for t in forward.outputs if sizes.bytes_of(t) == rows]
    assert [t.dtype for t in wide] == [tf.variant]
    # Those before each round, and those that are written.
    assert list(shared_lists(forward).values()).count(wide[0]) == 2
    assert wide[0] in popped_lists(backward)
    # What is given, and the states, of which there is a stack.
    most = MemoryEstimate(earliest(program), sizes).peak_bytes()
    assert 2 * rows <= most < 3 * rows + WIDTH * WIDTH * 4
