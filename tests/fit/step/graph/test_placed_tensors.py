"""Arrays over towers, columns and micro-batches, with any values."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.graph.placed_tensors import PlacedTensors
from keras_towers.partition.ir import axes
from keras_towers.partition.ir.program import Tensor

MESH = [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]
TOWERS, COLUMNS, MICRO_BATCHES = 3, 2, 4


def made():
    return PlacedTensors(Places(Ranks(), MESH, MICRO_BATCHES))


def tensor():
    return Tensor(tf.float32, tf.TensorShape([]), axes.BATCH)


def test_what_does_not_differ_between_places_has_one_value():
    tensors, of_all, of_towers, of_parts = made(), *(tensor() for _ in "123")
    tensors.shared[of_all] = "all"
    for here in tensors.at_places(axes.TOWERS):
        here[of_towers] = f"tower {here.tower}"
    for here in tensors.at_places(axes.BATCH | axes.COLUMNS):
        here[of_parts] = here.place
    shapes = [tensors.array(t).shape for t in (of_all, of_towers, of_parts)]
    assert shapes == [
        (1, 1, 1),
        (TOWERS, 1, 1),
        (TOWERS, COLUMNS, MICRO_BATCHES),
    ]
    everywhere = tensors.at_places(axes.BATCH | axes.COLUMNS)
    assert len(everywhere) == TOWERS * COLUMNS * MICRO_BATCHES
    for here in everywhere:
        assert here[of_all] == "all"
        assert here[of_towers] == f"tower {here.tower}"
        assert here[of_parts] == (here.tower, here.column, here.micro_batch)
        assert here.device == MESH[here.tower][here.column]
    for here in tensors.at_places(axes.TOWERS):
        # Columns have different ones.
        assert of_parts not in here
        assert here[of_towers] == f"tower {here.tower}"


def test_what_differs_between_towers_is_no_tensor_of_all():
    tensors, own = made(), tensor()
    first, *others = tensors.at_places(axes.TOWERS)
    first[own] = 1
    assert own in first
    # A tower whose turn has not come yet.
    assert not any(own in here for here in others)
    assert own not in tensors.shared
    with pytest.raises(KeyError):
        tensors.shared[own]


def test_sums_over_micro_batches():
    tensors, added, of_batch, shared = made(), *(tensor() for _ in "123")
    so_far = []
    for here in tensors.at_places(axes.BATCH):
        here[added] = here[of_batch] = 10**here.micro_batch * (1 + here.tower)
        so_far.append(tensors.add(added, here))
    for here in tensors.at_places(axes.TOWERS):
        here[shared] = here.tower
    assert so_far[:MICRO_BATCHES] == [1, 11, 111, 1111]
    for summed in added, of_batch:
        np.testing.assert_array_equal(
            tensors.sum(summed)[:, 0, 0], [1111, 2222, 3333]
        )
    np.testing.assert_array_equal(tensors.sum(shared)[:, 0, 0], range(TOWERS))
