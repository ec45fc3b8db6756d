"""When rows of variables are gathered, and what lives at each level."""

import tensorflow as tf

from keras_towers.partition.gathers import Gathers
from keras_towers.partition.layouts import Sharded, Value
from keras_towers.partition.program import Tensor


def _value():
    return Value(Sharded(0), _tensor(), shape=(4,))


def _tensor():
    return Tensor(tf.float32, tf.TensorShape([4]), on_towers=True)


def _gather(gathers, value, size, near):
    """Gather a value, or find it; return the level, or None if it was there."""
    if gathers.find(value, True, near) is not None:
        return None
    level = gathers.level_for(size, near, earliest=0)
    gathers.add(value, True, size, level, _tensor())
    return level


def test_what_fits_is_gathered_once():
    gathers, values = Gathers(100), [_value() for _ in range(2)]
    assert [_gather(gathers, v, 50, near=1) for v in values] == [0, 0]
    assert [_gather(gathers, v, 50, near=9) for v in values] == [None, None]


def test_what_does_not_fit_is_gathered_late_and_again():
    gathers = Gathers(100)
    kept, *values = [_value() for _ in range(4)]
    assert _gather(gathers, kept, 90, near=0) == 0
    # Half of the budget for the next level, and the rest for the one after it.
    assert [_gather(gathers, v, 25, near=2) for v in values] == [1, 1, 2]
    assert _gather(gathers, values[0], 25, near=2) is None
    assert _gather(gathers, values[2], 25, near=3) is None
    assert _gather(gathers, values[0], 25, near=9) == 8
    assert _gather(gathers, kept, 90, near=9) is None


def test_a_larger_value_is_gathered_alone():
    gathers, values = Gathers(10), [_value() for _ in range(2)]
    assert [_gather(gathers, v, 1000, near=5) for v in values] == [4, 5]


def test_a_whole_for_all_and_one_on_each_tower_are_two():
    gathers, value = Gathers(0), _value()
    assert _gather(gathers, value, 10, near=1) == 0
    assert gathers.find(value, False, 1) is None
