"""Observations of a strategy itself: scopes, run, reduce, gather."""

import numpy as np
import tensorflow as tf

from tests.compatibility.observing import (
    error_of,
    everyhow,
    numbers,
    observed,
    replica,
)


@observed
def contexts(strategy):
    def inside():
        context = replica()
        return {
            "id": context.replica_id_in_sync_group,
            "number": context.num_replicas_in_sync,
            "devices": len(context.devices),
            "same": context.strategy is strategy,
            "cross": tf.distribute.in_cross_replica_context(),
            "has": tf.distribute.has_strategy(),
        }

    with strategy.scope() as entered:
        found = [
            tf.distribute.get_strategy() is strategy,
            entered is strategy,
            tf.distribute.has_strategy(),
            tf.distribute.in_cross_replica_context(),
            replica() is None,
        ]
    return [
        found,
        tf.distribute.has_strategy(),
        strategy.num_replicas_in_sync,
        isinstance(strategy, tf.distribute.Strategy),
        len(strategy.extended.worker_devices),
        list(strategy.extended.parameter_devices),
        everyhow(strategy, inside),
    ]


@observed
def scope_inside_itself(strategy):
    def nested():
        with strategy.scope(), strategy.scope():
            inner = tf.distribute.get_strategy() is strategy
        return inner, tf.distribute.has_strategy()

    return error_of(nested)


@observed
def other_scope_inside(strategy):
    other = tf.distribute.OneDeviceStrategy("/device:CPU:0")

    def refused(outer, inner):
        # Only whether: towers raise an error of their own, with a hint.
        try:
            with outer.scope(), inner.scope():
                return False
        except (RuntimeError, ValueError):
            return True

    return (
        refused(strategy, other),
        refused(other, strategy),
        tf.distribute.has_strategy(),
    )


@observed
def global_strategy(strategy):
    def use():
        tf.distribute.experimental_set_strategy(strategy)
        found = tf.distribute.get_strategy() is strategy
        variable = tf.Variable(1.0)
        return found, len(strategy.experimental_local_results(variable))

    try:
        return error_of(use)
    finally:
        tf.distribute.experimental_set_strategy(None)


@observed
def run_structures(strategy):
    def step(a, b, c=None):
        assert c is not None
        return {"sum": (a + b["x"]) * c, "none": None, "text": "a", "n": 3}

    ones = numbers(strategy)
    call = {"args": (ones, {"x": ones}), "kwargs": {"c": 2.0}}
    return strategy.run(step, **call), strategy.run(tf.function(step), **call)


@observed
def run_nested_in_run(strategy):
    return everyhow(strategy, lambda: strategy.run(lambda: tf.constant(1.0)))


@observed
def reduce(strategy):
    found = {}
    for op in (*tf.distribute.ReduceOp, "SUM", "mean"):
        for dtype in ("float32", "float64", "bfloat16", "int32", "int64"):
            value = numbers(strategy, (2, 3), dtype)
            for axis in (None, 0, 1, -1):
                found[f"{op} {dtype} {axis}"] = error_of(
                    lambda value=value, op=op, axis=axis: tf.cast(
                        strategy.reduce(op, value, axis=axis), "float64"
                    )
                )
        for name, value in (
            ("tensor", tf.constant([1.0, 2.0])),
            ("number", 3.0),
            ("none", None),
            ("bool", tf.constant(True)),
        ):
            found[f"{op} {name}"] = error_of(
                lambda value=value, op=op: strategy.reduce(op, value, axis=None)
            )
    return found


@observed
def reduce_in_a_function(strategy):
    @tf.function
    def total(value):
        each = strategy.run(lambda x: {"a": x * x, "b": [x]}, (value,))
        return [
            tf.nest.map_structure(
                lambda v, op=op: strategy.reduce(op, v, axis=None), each
            )
            for op in ("SUM", "MEAN")
        ]

    return total(numbers(strategy, (3,)))


@observed
def gather(strategy):
    ragged = strategy.experimental_distribute_values_from_function(
        lambda c: (
            tf.ones([c.replica_id_in_sync_group + 1, 2])
            * c.replica_id_in_sync_group
        )
    )
    inside = tf.function(lambda v: strategy.gather(v, axis=0))
    same = numbers(strategy, (2, 2))
    return [
        *[error_of(lambda a=a: strategy.gather(same, a)) for a in (0, 1, 2)],
        *[error_of(lambda a=a: strategy.gather(ragged, a)) for a in (0, 1)],
        inside(ragged),
        error_of(lambda: strategy.gather(numbers(strategy), 0)),
        error_of(lambda: strategy.gather(tf.ones([2]), 0)),
    ]


@observed
def local_results(strategy):
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    local = strategy.experimental_local_results
    return [
        local(numbers(strategy)),
        local(variable),
        [v.device for v in local(variable)],
        local(tf.constant(4.0)),
        local({"a": 1}),
        type(local(numbers(strategy))).__name__,
    ]


@observed
def distributed_values(strategy):
    def value(context):
        return np.float32(
            context.replica_id_in_sync_group * 10 + context.num_replicas_in_sync
        )

    values = strategy.experimental_distribute_values_from_function(value)
    structure = strategy.experimental_distribute_values_from_function(
        lambda c: {"a": (c.replica_id_in_sync_group, "text")}
    )
    return [
        values,
        isinstance(values, tf.types.experimental.distributed.PerReplica)
        or strategy.num_replicas_in_sync == 1,
        structure,
        everyhow(strategy, lambda x: x + 1, values),
    ]
