"""When rows of variables are gathered, and what lives at each level."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.axes import ONCE, SHARDS, TOWERS
from keras_towers.partition.gathers import Gathers, gathered_bytes
from keras_towers.partition.layouts import InShards, Sharded
from keras_towers.partition.program import Tensor
from keras_towers.partition.values import Value
from tests.partition.kit import laid_out, sharded


def _value():
    return Value(Sharded(0), _tensor(), shape=(4,))


def _tensor():
    return Tensor(tf.float32, tf.TensorShape([4]), SHARDS)


def _gather(gathers, value, size, near):
    """Gather a value, or find it; return the level, or None if it was there."""
    if gathers.find(value, TOWERS, near) is not None:
        return None
    level = gathers.level_for(size, near, earliest=0)
    gathers.add(value, TOWERS, size, level, _tensor())
    return level


def test_what_fits_is_gathered_once():
    gathers, values = Gathers(200), [_value() for _ in range(2)]
    assert [_gather(gathers, v, 25, near=1) for v in values] == [0, 0]
    assert [_gather(gathers, v, 25, near=9) for v in values] == [None, None]


def test_what_does_not_fit_is_gathered_late_and_again():
    gathers = Gathers(100)
    values = [_value() for _ in range(6)]
    # A quarter of the budget at each level.
    levels = [_gather(gathers, v, 25, near=1) for v in values[:2]]
    assert levels == [0, 1]
    # What has no room beside these waits for a later level.
    assert [_gather(gathers, v, 25, near=1) for v in values[2:]] == [2, 3, 4, 5]
    # On the way back the newest are there, and the others have no room.
    found = [_gather(gathers, v, 25, near=6) for v in reversed(values)]
    assert found[:2] == [None, None]
    assert None not in found[2:]


def test_a_larger_value_is_gathered_alone():
    gathers, values = Gathers(10), [_value() for _ in range(2)]
    assert [_gather(gathers, v, 1000, near=5) for v in values] == [4, 5]


def test_a_whole_for_all_and_one_on_each_tower_are_two():
    gathers, value = Gathers(0), _value()
    assert _gather(gathers, value, 10, near=1) == 0
    assert gathers.find(value, ONCE, 1) is None


@pytest.mark.parametrize("largest", [25, 40, 90])
@pytest.mark.parametrize("seed", range(20))
def test_the_budget_holds_at_each_level(seed, largest):
    """Layers use some wholes side by side, and again in reverse order."""
    random, gathers = np.random.default_rng(seed), Gathers(100)
    layers = [
        [(_value(), random.integers(1, 25)) for _ in range(random.integers(5))]
        for _ in range(10)
    ]
    layers[random.integers(10)].append((_value(), largest))
    near = 1
    for layer in [*layers, *reversed(layers)]:
        levels = [near]
        for value, size in layer:
            whole = gathers.find(value, TOWERS, near)
            if whole is None:
                level = gathers.level_for(size, near, 0)
                gathers.add(value, TOWERS, size, level, _tensor())
                levels.append(level + 1)
        near = max(levels) + int(random.integers(2))
    on_top = largest if largest > 25 else 0
    assert max(gathers._held.values()) <= 100 + on_top


@pytest.mark.parametrize(("budget", "most"), [(2**20, 3), (0, 2)])
def test_the_bytes_of_gathered_weights(budget, most):
    """One is used while the next is gathered; rows of examples do not count."""
    weights = [tf.Variable(tf.ones([8, 8])) for _ in range(3)]

    def function(x):
        x = x - tf.reduce_mean(x, 0)
        for weight in weights:
            x = tf.tanh(x @ weight)
        return x + tf.reverse(x, [0])

    program = laid_out(
        function,
        sharded(-1, 8),
        captured=InShards(0, 8),
        gather_bytes=budget,
    )
    assert max(gathered_bytes(program)) == most * 8 * 8 * 4
