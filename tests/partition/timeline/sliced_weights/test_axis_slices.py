"""Slices of axes that towers divide: cut, put together, and looked up."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.emission import emit
from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.sliced_weights.axis_slices import (
    Cut,
    Slicer,
)
from tests.partition.kit import by_hand

# The rows of two towers in two slices, as in the docstring.
CUT = Cut(4, 2, 2)
OF_DOCSTRING = [[0, 1, 4, 5], [2, 3, 6, 7]]


def run(add, *values, shapes=None):
    """Return what operations that a function adds make of values."""
    builder = Builder()
    shapes = shapes or [np.shape(value) for value in values]
    dtypes = [tf.as_dtype(np.asarray(value).dtype) for value in values]
    inputs = [
        Tensor(dtype, tf.TensorShape(shape), BATCH)
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]
    sizes = TensorSizes(by_hand(builder, *inputs), 2, 3)
    wanted = add(Slicer(builder, sizes), *inputs)

    @tf.function
    def run():
        given = dict(zip(inputs, map(tf.constant, values), strict=True))
        return emit(builder.operations, given, wanted)

    found = [tensor.numpy() for tensor in run()]
    for tensor, value in zip(wanted, found, strict=True):
        assert tensor.shape.is_compatible_with(value.shape)
        # The unknown size is the rows of a tower.
        assert sizes.entries(tensor) == value.size
    return found


@pytest.mark.parametrize("unknown", [(), (0,), (0, 1)])
@pytest.mark.parametrize(
    "cut", [Cut(5, 1, 3), Cut(5, 2, 3), Cut(2, 3, 2), Cut(4, 1, 4)], ids=str
)
def test_slices_put_together_are_the_whole(cut, unknown):
    whole = np.random.default_rng(0).random((3, 3, cut.own * cut.towers, 2))
    shape = [None if k in unknown else n for k, n in enumerate(whole.shape)]

    def add(slicer, tensor):
        slices = [slicer.slice_of(tensor, 2, cut, k) for k in range(cut.number)]
        return [*slices, slicer.joined(slices, 2, cut)]

    *slices, found = run(add, whole, shapes=[shape])
    np.testing.assert_array_equal(found, whole)
    assert [s.shape[2] for s in slices] == [*map(cut.size, range(cut.number))]


def test_row_numbers_within_a_slice():
    numbers = np.array([0, 1, 2, 5, 6, 7, -1, 8], "int32")

    def add(slicer, given):
        return [
            tensor
            for find in (slicer.own_numbers, slicer.in_table)
            for index in range(2)
            for tensor in find(given, CUT, index)
        ]

    found = run(add, numbers)
    wholes = [*zip(found[::2], found[1::2], strict=True)]
    for (own, inside), rows in zip(wholes, OF_DOCSTRING * 2, strict=True):
        assert inside.tolist() == [number in rows for number in numbers]
        assert own[inside].tolist() == [
            rows.index(number) for number in numbers if number in rows
        ]
    for own, inside in wholes[2:]:
        # What a lookup is to refuse is still there; others are some row.
        assert own[-2:].tolist() == [-1, 8]
        assert not own[:-2][~inside[:-2]].any()
