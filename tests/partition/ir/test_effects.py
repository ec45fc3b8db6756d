"""Which operations have an effect, and on what."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.effects import (
    Effect,
    effect_of,
    is_draw,
    written,
)
from tests.partition.kit import replicated, trace

VARIABLE = tf.Variable(1.0)
STATE = tf.Variable([1, 2, 3], dtype=tf.int64)
TABLE = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)


def _asserted(x):
    return tf.raw_ops.Assert(condition=tf.reduce_all(x > 0), data=[x])


@tf.function
def _writes(x):
    VARIABLE.assign_add(tf.reduce_sum(x))


@tf.function
def _writes_and_prints(x):
    VARIABLE.assign(tf.reduce_sum(x))
    tf.print(x)


def _assigned(x):
    VARIABLE.assign(x[0])


def _branch(act):
    def function(x):
        return tf.cond(
            x[0] > 0,
            lambda: (act(x), tf.constant(1))[1],
            lambda: tf.constant(0),
        )

    return function


def _drawn(x):
    return tf.raw_ops.StatefulUniform(
        resource=STATE.handle, algorithm=tf.constant(1, tf.int64), shape=[2]
    )


# The type of an operation, and its effect.
EFFECTS = {
    "arithmetic": ("Sin", Effect.NONE, tf.sin),
    "a read": ("ReadVariableOp", Effect.NONE, lambda x: x * VARIABLE),
    "a write": ("AssignVariableOp", Effect.PER_PROCESS, _assigned),
    "a seeded draw": (
        "StatelessRandomUniformV2",
        Effect.NONE,
        lambda x: tf.random.stateless_uniform([2], [1, 2]),
    ),
    "a draw": (
        "RandomUniform",
        Effect.EXTERNAL,
        lambda x: tf.random.uniform([2]),
    ),
    "a draw from a variable": ("StatefulUniform", Effect.PER_PROCESS, _drawn),
    "output": ("PrintV2", Effect.EXTERNAL, tf.print),
    "a call of Python": (
        "EagerPyFunc",
        Effect.EXTERNAL,
        lambda x: tf.py_function(lambda y: y, [x], tf.float32),
    ),
    "a look-up in a table": (
        "LookupTableFindV2",
        Effect.EXTERNAL,
        lambda x: TABLE.lookup(tf.cast(x, tf.int64)),
    ),
    "an entry of a table": (
        "LookupTableInsertV2",
        Effect.PER_PROCESS,
        lambda x: TABLE.insert(tf.cast(x, tf.int64), x),
    ),
    "a new object": (
        "VarHandleOp",
        Effect.PER_PROCESS,
        lambda x: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]),
    ),
    "a call that writes": (
        "StatefulPartitionedCall",
        Effect.PER_PROCESS,
        _writes,
    ),
    "a call that prints, too": (
        "StatefulPartitionedCall",
        Effect.EXTERNAL,
        _writes_and_prints,
    ),
    "a branch that writes": ("If", Effect.PER_PROCESS, _branch(_writes)),
    "a check": ("Assert", Effect.CHECK, _asserted),
    "a branch that checks": ("If", Effect.CHECK, _branch(_asserted)),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effect_of(name):
    type_, wanted, function = EFFECTS[name]

    def step(x):
        function(x)
        return x

    graph = trace(step, replicated(2))
    (operation,) = [o for o in graph.get_operations() if o.type == type_]
    assert effect_of(operation) is wanted
    is_written = "write" in name or "prints" in name or "variable" in name
    assert bool(written(operation)) == is_written


def test_is_draw():
    types = ("StatelessRandomUniformV2", "StatelessMultinomial", "Sin", "none")
    assert [*map(is_draw, types)] == [True, True, False, False]
