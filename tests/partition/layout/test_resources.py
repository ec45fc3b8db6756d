"""The order in which resources are read and written."""

import types

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import ONCE, TOWERS
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.layouts import REPLICATED
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.values import Value
from keras_towers.partition.layout.resources import VariableContents
from keras_towers.partition.timeline.timeline import Levels

NUMBER = tf.TensorShape([])


def handle(axes=ONCE):
    return Tensor(tf.resource, NUMBER, axes, handle="handle data")


@pytest.fixture
def mirrored():
    """Resources with a variable that has copies, and both its handles."""
    resources = VariableContents(types.SimpleNamespace(builder=Builder()))
    common, local = handle(), handle(TOWERS)
    resources.add_copies(common, local)
    return resources, common, local


def use(resources, type_, *inputs, reads=True):
    builder = Builder()
    builder.add(type_, inputs, {}, [])
    resources.record_use(builder.last, reads)
    return builder.last


def read(resources, variable):
    return use(resources, "ReadVariableOp", variable)


def write(resources, variable):
    value = Tensor(tf.float32, NUMBER, variable.axes)
    return use(resources, "AssignVariableOp", variable, value, reads=False)


def levels_of(resources, late):
    """Return the levels of all uses, if one is possible on level 2 only."""
    levels = Levels(resources.before)
    return [levels.place(o, 2 * (o is late)) for o in resources.before]


def test_towers_read_in_the_next_level_what_they_write_at_the_end_of_one(
    mirrored,
):
    resources, common, local = mirrored
    first, written = read(resources, local), write(resources, local)
    again, once = read(resources, local), read(resources, common)
    follow = {first: [], written: [first], again: [written], once: [written]}
    assert resources.before == follow
    # What is computed once comes first in a level.
    assert levels_of(resources, written) == [0, 2, 3, 3]


def test_towers_read_at_once_what_is_written_once(mirrored):
    resources, common, local = mirrored
    written, after = write(resources, common), read(resources, local)
    assert resources.before == {written: [], after: [written]}
    assert levels_of(resources, written) == [2, 2]


def test_a_write_follows_all_reads(mirrored):
    resources, common, local = mirrored
    other, first = read(resources, handle(TOWERS)), read(resources, local)
    second, written = read(resources, local), write(resources, local)
    last = write(resources, common)
    assert resources.before[written] == [first, second]
    assert resources.before[last] == [written]
    assert resources.before[other] == []
    # Towers have read it by then, but what is computed once comes first.
    assert levels_of(resources, second) == [0, 0, 2, 2, 3]


def test_updates_read_what_they_have_written_in_the_same_level(mirrored):
    resources, _, local = mirrored
    written = write(resources, local)
    by_update = use(resources, "ResourceGather", local)
    after = read(resources, local)
    assert resources.before[by_update] == resources.before[after] == [written]
    assert levels_of(resources, written) == [2, 2, 3]


def test_what_is_written_is_not_known_any_more(mirrored):
    resources, common, local = mirrored
    other = handle()
    resources.contents[common] = Value(REPLICATED)
    resources.contents[other] = Value(REPLICATED)
    write(resources, local)
    assert common not in resources.contents
    assert other in resources.contents
