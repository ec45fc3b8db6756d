"""Which axis of a variable is divided, and into which rows."""

import functools
import weakref

import pytest
import tensorflow as tf

from keras_towers.fit.weights import shards
from keras_towers.fit.weights.shards import (
    SMALLEST_BYTES,
    ShardedVariable,
    choose_layout,
    part_of,
    share_counts,
)
from keras_towers.partition.ir.layouts import InShards, MeshLayout

LARGE = SMALLEST_BYTES // 4


@pytest.mark.parametrize(
    "shape, towers, axis",
    [
        ((), 2, None),
        ((LARGE - 1,), 3, None),
        ((LARGE,), 2, 0),
        ((LARGE,), 1, None),
        # The longest axis that divides evenly, else the first.
        ((256, 512), 2, 1),
        ((512, 256), 2, 0),
        ((255, 512), 2, 1),
        ((1001, 64), 2, 1),
        ((1001, 333), 2, 0),
        # Each tower has a row.
        ((2, LARGE + 1), 3, 1),
        ((3, 3, 2**10, 2**10), 4, 2),
        ((1, 2, 2) * 9, 3, None),
    ],
)
def test_axis(shape, towers, axis):
    rows = choose_layout(shape, 4, towers).rows
    assert axis == (None if rows is None else rows.axis)
    if rows is not None:
        counts = share_counts(rows.size, towers)
        assert counts == [rows.rows] * towers or rows.rows is None


def test_shares_differ_by_one_row():
    for size in range(3, 20):
        counts = share_counts(size, 3)
        assert sum(counts) == size
        assert max(counts) - min(counts) <= 1


def divided(original, layout, mesh):
    part = functools.partial(part_of, original.read_value())
    return ShardedVariable(original, part, layout, mesh)


def test_a_part_does_not_keep_the_rest_alive():
    whole = tf.reshape(tf.range(64.0), [8, 8])
    pointer = whole.numpy().__array_interface__["data"][0]
    rows = part_of(whole, [0, 0], [4, 8])
    assert rows.numpy().__array_interface__["data"][0] != pointer
    assert rows.numpy().tolist() == whole[:4].numpy().tolist()


def test_a_wrong_shape_changes_nothing():
    original = tf.Variable(tf.reshape(tf.range(6.0), [3, 2]), name="kernel")
    variable = divided(
        original,
        MeshLayout(towers=InShards(0, 3)),
        [["/device:CPU:0"], ["/device:CPU:1"]],
    )
    assert [tuple(s.shape) for (s,) in variable.shards] == [(1, 2), (2, 2)]
    assert variable.name == original.name
    with pytest.raises(ValueError, match="shape"):
        variable.assign(tf.ones([2, 2]))
    assert variable.numpy().tolist() == original.numpy().tolist()
    assert bool(variable.is_initialized())


def test_what_is_assigned_is_divided_part_by_part(monkeypatch):
    """Nothing is put together for it, and a part goes before the next."""
    variable = divided(
        tf.Variable(tf.zeros([4, 6])),
        MeshLayout(towers=InShards(1, 6), columns=InShards(0, 4)),
        [
            ["/device:CPU:0", "/device:CPU:1"],
            ["/device:CPU:0", "/device:CPU:1"],
        ],
    )
    made, alive = [], []

    def watched(*given):
        part = part_of(*given)
        made.append(weakref.ref(part))
        alive.append(sum(reference() is not None for reference in made))
        return part

    monkeypatch.setattr(shards, "part_of", watched)
    monkeypatch.delattr(ShardedVariable, "_rows")
    value = tf.reshape(tf.range(24.0), [4, 6])
    variable.assign(value)
    monkeypatch.undo()
    assert alive == [1, 2, 2, 2]  # one is made, one assigned
    assert variable.numpy().tolist() == value.numpy().tolist()
    assert variable.shards[1][0].numpy().tolist() == [[3, 4, 5], [9, 10, 11]]
