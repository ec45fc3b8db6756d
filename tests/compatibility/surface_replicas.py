"""Observations of what replicas tell each other."""

import itertools

import tensorflow as tf

from tests.compatibility.observing import (
    everyhow,
    number,
    numbers,
    observed,
    replica,
)

OPERATIONS = ("SUM", "MEAN")


@observed
def all_reduce(strategy):
    def step(op, dtype):
        mine = number(dtype)
        nested = {"a": mine, "b": [tf.fill([2, 3], mine), mine * 2]}
        return tf.nest.map_structure(
            lambda t: tf.cast(t, "float64"), replica().all_reduce(op, nested)
        )

    return {
        f"{op} {dtype}": everyhow(strategy, lambda o=op, d=dtype: step(o, d))
        for op in OPERATIONS
        for dtype in ("float32", "float64", "float16", "int32", "int64")
    }


@observed
def all_reduce_of_odd_values(strategy):
    constant = tf.constant(2.0)

    def sparse():
        return tf.IndexedSlices(
            tf.fill([1, 2], number()),
            tf.reshape(number("int32"), [1]),
            tf.constant([5, 2]),
        )

    values = {
        "one object": lambda: constant,
        "python": lambda: 3.0,
        "none": lambda: None,
        "empty": lambda: [],
        "sparse": sparse,
    }
    return {
        f"{op} {name}": everyhow(
            strategy, lambda o=op, v=value: replica().all_reduce(o, v())
        )
        for op in OPERATIONS
        for name, value in values.items()
    }


@observed
def gradient_through_all_reduce(strategy):
    def step(op):
        x = tf.fill([2], number())
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = replica().all_reduce(op, x * x) * number()
        return tape.gradient(y, x)

    return {op: everyhow(strategy, lambda o=op: step(o)) for op in OPERATIONS}


@observed
def all_gather(strategy):
    def step(axis, ragged):
        shape = [2, 2]
        if ragged:
            shape[axis] = replica().replica_id_in_sync_group + 1
        x = tf.ones(shape) * number()
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = replica().all_gather(x, axis)
            y = tf.reduce_sum(gathered * gathered) * number()
        return gathered, tape.gradient(y, x)

    return [
        everyhow(strategy, lambda a=axis, r=ragged: step(a, r))
        for axis, ragged in itertools.product((0, 1), (False, True))
    ]


@observed
def merge_call(strategy):
    def merged(given, value, factor=1.0):
        assert given is strategy
        assert tf.distribute.in_cross_replica_context()
        return given.reduce("SUM", value, axis=None) * factor

    def step():
        return replica().merge_call(
            merged, args=(number(),), kwargs={"factor": 10.0}
        )

    def in_a_branch():
        return tf.cond(number() > 0, step, lambda: 0.0)

    return everyhow(strategy, step), everyhow(strategy, in_a_branch)


@observed
def extended_update(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0)
        value = numbers(strategy)
        reduced = strategy.extended.reduce_to("SUM", value, variable)
        strategy.extended.update(
            variable, lambda v, t: v.assign_add(t), args=(reduced,)
        )
        several = strategy.extended.batch_reduce_to(
            "MEAN", [(value, variable), (numbers(strategy, (2,)), variable)]
        )
    return variable.values, several
