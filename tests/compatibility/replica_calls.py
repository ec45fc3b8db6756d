"""TensorFlow's calls in replicas, between them and of variables: one table.

Replica i of N has ``[[i]]``. A row is what is called, and what replica i gets.
"""

import itertools

import numpy as np
import tensorflow as tf

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def column(n):
    return np.arange(n, dtype="float32")[:, None]


def row(n):
    return column(n).T


def one(value):
    return np.full([1, 1], value, "float32")


def total(n):
    return n * (n - 1) / 2


def weighed(context, x, combine):
    """The gradient of a sum to which replica i adds i + 1 times its result."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = combine(context, x)
        rows = tf.cast(tf.range(tf.shape(result)[0]), tf.float32)
        own = 1 + tf.stop_gradient(x[0, 0])
        loss = own * tf.reduce_sum(result * (1 + rows[:, None]))
    return tape.gradient(loss, x)


def gathered(context, x):
    return context.all_gather(x, 0)


def summed(context, x):
    return context.all_reduce(SUM, x)


def some_rows(x):
    """As many rows as the number of the replica says, and one more."""
    return tf.repeat(x, tf.cast(x[0, 0], tf.int32) + 1, 0)


def slices(context, x):
    sparse = tf.IndexedSlices(x, tf.constant([1]), tf.constant([3, 1]))
    return tf.convert_to_tensor(context.all_reduce("SUM", sparse))


def merged(merge):
    return lambda context, x: context.merge_call(merge, args=(x,))


IN_REPLICAS = {
    "its number": (
        lambda c, x: c.replica_id_in_sync_group,
        lambda i, n: i,
    ),
    "how many": (lambda c, x: c.num_replicas_in_sync, lambda i, n: n),
    "its devices": (lambda c, x: len(c.devices), lambda i, n: 1),
    "all_gather": (gathered, lambda i, n: column(n)),
    "all_gather of columns": (
        lambda c, x: c.all_gather(x, tf.constant(-1)),
        lambda i, n: row(n),
    ),
    "all_gather of a constant": (
        lambda c, x: c.all_gather(tf.constant([1, 2]), 0),
        lambda i, n: np.tile([1, 2], n),
    ),
    "all_gather of several": (
        lambda c, x: c.all_gather({"a": x, "b": [x[0]]}, 0),
        lambda i, n: {"a": column(n), "b": [row(n)[0]]},
    ),
    "all_gather of other numbers of rows": (
        lambda c, x: c.all_gather(some_rows(x), 0),
        lambda i, n: np.repeat(column(n), np.arange(n) + 1, 0),
    ),
    "the gradient of all_gather": (
        lambda c, x: weighed(c, x, gathered),
        lambda i, n: one((i + 1) * (total(n) + n)),
    ),
    "all_reduce": (summed, lambda i, n: one(total(n))),
    "all_reduce to a mean": (
        lambda c, x: c.all_reduce(MEAN, x),
        lambda i, n: one(total(n) / n),
    ),
    "all_reduce of several": (
        lambda c, x: c.all_reduce("SUM", [x, {"a": tf.cast(x, tf.int32)}]),
        lambda i, n: [one(total(n)), {"a": one(total(n))}],
    ),
    "all_reduce of a constant": (
        lambda c, x: c.all_reduce("SUM", tf.constant(2.0)),
        lambda i, n: 2.0 * n,
    ),
    "all_reduce of slices": (slices, lambda i, n: total(n) * np.eye(3)[:, 1:2]),
    "the gradient of all_reduce": (
        lambda c, x: weighed(c, x, summed),
        lambda i, n: one(total(n) + n),
    ),
    "reduce_to": (
        merged(lambda s, x: s.extended.reduce_to("SUM", x, x)),
        lambda i, n: one(total(n)),
    ),
    "reduce_to a device": (
        merged(lambda s, x: s.extended.reduce_to("MEAN", x, "/cpu:0")),
        lambda i, n: one(total(n) / n),
    ),
    "batch_reduce_to": (
        merged(lambda s, x: s.extended.batch_reduce_to("SUM", [(x, x)] * 2)),
        lambda i, n: [one(total(n))] * 2,
    ),
    "gather": (merged(lambda s, x: s.gather(x, 0)), lambda i, n: column(n)),
}


def seen(x):
    return tf.reduce_sum(x + 1)


BETWEEN_REPLICAS = {
    "reduce": (lambda s, x: s.reduce("SUM", x, None), lambda n: one(total(n))),
    "reduce over an axis": (
        lambda s, x: s.reduce("SUM", x, 0),
        lambda n: one(total(n))[0],
    ),
    "reduce to a mean": (
        lambda s, x: s.reduce("MEAN", x, None),
        lambda n: one(total(n) / n),
    ),
    "reduce to a mean over axes": (
        lambda s, x: s.reduce("MEAN", x, (0, 1)),
        lambda n: total(n) / n,
    ),
    "reduce to a mean over other numbers of rows": (
        lambda s, x: s.reduce("MEAN", s.run(some_rows, (x,)), 0),
        lambda n: one(
            np.sum(np.arange(n) * np.arange(1, n + 1)) / (total(n) + n)
        )[0],
    ),
    "the mean of what all have": (
        lambda s, x: s.reduce("MEAN", tf.constant(3.0), None),
        lambda n: 3.0,
    ),
    "gather": (lambda s, x: s.gather(x, 0), column),
    "gather columns": (
        lambda s, x: s.gather(x, 1),
        row,
    ),
    "reduce_to": (
        lambda s, x: s.extended.reduce_to("SUM", x, x),
        lambda n: one(total(n)),
    ),
    "reduce_to a device": (
        lambda s, x: s.extended.reduce_to("SUM", x, "/cpu:0"),
        lambda n: one(total(n)),
    ),
    "batch_reduce_to": (
        lambda s, x: s.extended.batch_reduce_to("MEAN", [(x, x)]),
        lambda n: [one(total(n) / n)],
    ),
    "broadcast_to": (
        lambda s, x: s.extended.broadcast_to(tf.constant(2.0), x),
        lambda n: 2.0,
    ),
    "run": (
        lambda s, x: s.reduce("SUM", s.run(seen, kwargs={"x": x}), None),
        lambda n: total(n) + n,
    ),
}


def assigned(variable, context, x):
    variable.assign_add(x)


def updated(variable, context, x):
    """Add the sum of all replicas to each copy."""
    whole = context.all_reduce("SUM", x)
    update = context.strategy.extended.update
    update(variable, lambda copy, value: copy.assign_add(value), (whole,))


def updated_between(variable, context, x):
    def merge(strategy, x):
        whole = strategy.extended.reduce_to("SUM", x, destinations=variable)
        strategy.extended.update(
            variable, lambda copy, value: copy.assign_add(value), (whole,)
        )

    context.merge_call(merge, args=(x,))


# How it is written, its options, and what all read between replicas.
OF_VARIABLES = {
    "sum": (assigned, {"aggregation": "SUM"}, total),
    "mean": (assigned, {"aggregation": "MEAN"}, lambda n: total(n) / n),
    "sum of parts": (
        assigned,
        {"aggregation": "SUM", "synchronization": "ON_READ"},
        total,
    ),
    "mean of parts": (
        assigned,
        {"aggregation": "MEAN", "synchronization": "ON_READ"},
        lambda n: total(n) / n,
    ),
    "update": (updated, {}, total),
    "update between replicas": (updated_between, {}, total),
}


def ways_to_run(strategy):
    """Ways to run a function of a replica: eagerly, and in functions."""
    return {
        "eagerly": lambda function, x: strategy.run(function, (x,)),
        "in a function": lambda function, x: tf.function(
            lambda value: strategy.run(function, (value,))
        )(x),
        "as a function": lambda function, x: strategy.run(
            tf.function(function), (x,)
        ),
    }


def assert_calls(strategy):
    """Each row of the table, in and out of functions; in all processes."""
    n, first = strategy.num_replicas, strategy.first_tower
    x = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([[float(context.replica_id_in_sync_group)]])
    )
    ways = ways_to_run(strategy)
    for (name, (call, wanted)), way in itertools.product(
        IN_REPLICAS.items(), ways
    ):

        def function(x, call=call):
            context = tf.distribute.get_replica_context()
            assert context.strategy is strategy
            found = call(context, x)
            return tf.nest.map_structure(tf.convert_to_tensor, found)

        results = strategy.experimental_local_results(ways[way](function, x))
        # What all have may be one value.
        for i, result in enumerate(results, first):
            assert_same(result, wanted(i, n), f"{name} {way}")
    for (name, (call, wanted)), traced in itertools.product(
        BETWEEN_REPLICAS.items(), (False, True)
    ):

        def between(x, call=call):
            return call(strategy, x)

        found = (tf.function(between) if traced else between)(x)
        for result in strategy.experimental_local_results(found):
            assert_same(result, wanted(n), f"{name}, traced: {traced}")
    for (name, (write, options, wanted)), way in itertools.product(
        OF_VARIABLES.items(), ways
    ):
        with strategy.scope():
            variable = tf.Variable(0.0, **enums(options))

        def writes(x, write=write, variable=variable):
            write(variable, tf.distribute.get_replica_context(), x[0, 0])

        ways[way](writes, x)
        found = variable.read_value()
        assert_same(found, wanted(n), f"{name} {way}")
        assert strategy.extended.variable_created_in_scope(variable)
        (copy, *_) = strategy.experimental_local_results(variable)
        assert strategy.extended.value_container(copy) is variable


def enums(options):
    kinds = {
        "aggregation": tf.VariableAggregation,
        "synchronization": tf.VariableSynchronization,
    }
    return {name: getattr(kinds[name], options[name]) for name in options}


def assert_same(found, wanted, what):
    """Both have the same structure, shapes and numbers."""
    found, wanted = tf.nest.flatten(found), tf.nest.flatten(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == np.shape(other), what
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=what)


def values_without_seed(strategy):
    """The copies of variables made in the scope, and in a replica."""
    copies = []
    for run in ways_to_run(strategy).values():
        with strategy.scope():
            made = [tf.Variable(tf.random.normal([2]))]

        def function(x, made=made):
            if len(made) == 1:
                made.append(tf.Variable(lambda: tf.random.normal([2])))
            return made[0] + made[1] + x

        run(function, tf.constant(0.0))
        for variable in made:
            copies += strategy.experimental_local_results(variable)
    return [copy.numpy().tolist() for copy in copies]
