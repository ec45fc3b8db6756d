"""Whether a callback has written a variable."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.calls import callback_effects


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ([np.nan, 1.0], [np.nan, 1.0], True),
        ([0.0], [-0.0], False),
        ([True, False], [True, True], False),
        ([3, 4], [3, 4], True),
    ],
)
def test_a_value_is_written_if_its_bits_differ(before, after, same):
    values = [[tf.constant(before)], [tf.constant(after)]]
    assert callback_effects._is_same(*values) == same


def test_what_is_assigned_while_it_is_referenced_is_compared():
    variable = tf.Variable([np.nan, 2.0])
    before = [variable.read_value()]
    assert callback_effects._is_same(before, [variable.read_value()])
    variable.assign([np.nan, 3.0])
    assert not callback_effects._is_same(before, [variable.read_value()])
