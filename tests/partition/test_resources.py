"""When resources may be read and written."""

import pytest
import tensorflow as tf

from keras_towers.partition.axes import ONCE, TOWERS
from keras_towers.partition.layouts import REPLICATED
from keras_towers.partition.program import Phase, Tensor, phase_of
from keras_towers.partition.resources import Resources
from keras_towers.partition.values import Value

NUMBER = tf.TensorShape([])


def handle(axes=ONCE, level=0):
    return Tensor(tf.resource, NUMBER, axes, level, handle="handle data")


@pytest.fixture
def mirrored():
    """Resources with a variable that has copies, and both its handles."""
    resources, common, local = Resources(), handle(), handle(TOWERS)
    resources.add_copies(common, local)
    return resources, common, local


def read(resources, variable):
    phase = phase_of("ReadVariableOp", [variable])
    return resources.record_use(phase, [variable], reads=True)


def write(resources, variable, level=0):
    value = Tensor(tf.float32, NUMBER, variable.axes, level)
    phase = phase_of("AssignVariableOp", [variable, value])
    return resources.record_use(phase, [variable, value], reads=False)


def test_towers_read_in_the_next_level_what_they_write_at_the_end_of_one(
    mirrored,
):
    resources, common, local = mirrored
    assert read(resources, local) == 0
    assert write(resources, local, level=2) == 0
    assert read(resources, local) == 3
    # What is computed once comes first in a level.
    assert read(resources, common) == 3


def test_towers_read_at_once_what_is_written_once(mirrored):
    resources, common, local = mirrored
    write(resources, common, level=1)
    assert read(resources, local) == 1


def test_a_write_waits_for_reads(mirrored):
    resources, common, local = mirrored
    assert read(resources, handle(TOWERS, 4)) == 0
    resources.record_use(
        Phase.READ, [local, Tensor(tf.int32, NUMBER, TOWERS, 4)], True
    )
    # Towers have read it by then, but what is computed once comes first.
    assert write(resources, local) == 4
    assert resources.earliest_level(Phase.ONCE, [common], False) == 5


def test_updates_read_what_they_have_written_in_the_same_level(mirrored):
    resources, _, local = mirrored
    write(resources, local, level=2)
    assert resources.record_use(Phase.UPDATE, [local], reads=True) == 2
    assert read(resources, local) == 3


def test_what_is_written_is_not_known_any_more(mirrored):
    resources, common, local = mirrored
    other = handle()
    resources.contents[common] = Value(REPLICATED)
    resources.contents[other] = Value(REPLICATED)
    write(resources, local)
    assert common not in resources.contents
    assert other in resources.contents
