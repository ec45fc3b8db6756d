"""Which variables code of the user has written, by Python or a function."""

import gc

import keras
import pytest
import tensorflow as tf

from keras_towers.fit import keras_patches
from keras_towers.fit.weights import writes
from keras_towers.fit.weights.without_memory import DeferredVariable
from keras_towers.fit.weights.writes import OuterVariable

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def noting():
    """As in a process that is one of several ranks."""
    with keras_patches.note_writes():
        yield
    keras_patches.note_writes.cache_clear()


def raised(variable):
    return tf.function(lambda: variable.assign_add([1.0, 1.0]))


WRITES = {
    "assign": lambda v: v.assign([1.0, 2.0]),
    "add": lambda v: v.assign_add([1.0, 2.0]),
    "a slice": lambda v: v[1].assign(3.0),
    "scatter": lambda v: v.scatter_update(tf.IndexedSlices([1.0], [0])),
    "several": lambda v: v.scatter_nd_update([[0]], [1.0]),
    "function": lambda v: raised(v)(),
    "called function": lambda v: tf.function(lambda: raised(v)())(),
    "branch": lambda v: tf.function(
        lambda x: tf.cond(x > 0, raised(v), lambda: v)
    )(tf.constant(1)),
    "gradient": lambda v: keras.optimizers.Adam(1.0).apply([v * 0 + 1], [v]),
}


@pytest.mark.parametrize("how", WRITES)
def test_writes_are_noted_once(how):
    native, other = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])
    variable = keras.Variable([0.0, 0.0]) if how == "gradient" else native
    outer = OuterVariable([other.handle], [""])
    given = [outer, variable]
    writes.take(given)
    before = writes.number()
    WRITES[how](variable)
    assert writes.number() > before
    assert writes.take(given) == [1]
    assert writes.take(given) == []
    outer.assign([5.0, 6.0])
    assert other.numpy().tolist() == outer.read_value().numpy().tolist()
    gc.collect()
    other.assign_add([1.0, 1.0])
    assert writes.take(given) == [0]


def test_reads_and_traces_are_no_writes():
    variable = tf.Variable([0.0, 0.0])
    writes.take([variable])
    before = writes.number()
    tf.function(lambda: variable * 2)()
    raised(variable).get_concrete_function()
    variable.read_value()
    assert writes.number() == before
    assert writes.take([variable]) == []


def test_what_has_its_first_value_is_not_written_and_keeps_no_memory():
    like = keras.Variable(tf.ones([2, 3]), name="kernel")
    variable = DeferredVariable(like, keras.initializers.Ones())
    assert writes.take([variable]) == []
    assert variable.first_value is not None
    variable.assign([[1.0, 2.0, 3.0]] * 2)
    assert writes.take([variable]) == [0]
