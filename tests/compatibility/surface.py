"""Observations of the public surface of a strategy, as values to compare.

An observation takes a strategy and gives a structure of NumPy values and
strings: what stock MirroredStrategy gives for it, a tower strategy has to give.
What is inherited as it is, such as the kinds of variables or how datasets are
distributed, is for the tests of TensorFlow and Keras.
"""

import functools

import tensorflow as tf

OBSERVATIONS = {}


def observed(function):
    OBSERVATIONS[function.__name__] = function
    return function


def plain(value):
    """Turn what a strategy gives into values that can be compared."""
    match value:
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
        case tf.distribute.DistributedValues():
            return plain(value.values)
        case tf.IndexedSlices():
            return plain(tf.convert_to_tensor(value))
        case tf.Tensor() | tf.Variable():
            return value.numpy()
    return value


def replica():
    return tf.distribute.get_replica_context()


def number(dtype="float32"):
    """The number of this replica, from 1."""
    return tf.cast(replica().replica_id_in_sync_group + 1, dtype)


def of_each(strategy, make):
    """A value that a function makes for each replica, counted from 0."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def numbers(strategy, shape=(), dtype="float32"):
    """One value for each replica: its number, from 1."""
    return of_each(strategy, lambda k: tf.fill(shape, tf.cast(k + 1, dtype)))


def error_of(function, *args):
    """The outcome, or the class of the error that it ends in."""
    try:
        return plain(function(*args))
    except Exception as error:
        return f"raises {_public(type(error))}"


def _public(error):
    """The first builtin or TensorFlow class that users would catch."""
    for cls in error.__mro__:
        if not cls.__module__.startswith("keras_towers"):
            return cls.__name__
    raise AssertionError(error)


def everyhow(strategy, step, *args):
    """Run a step eagerly, as a tf.function, and inside of one."""
    traced = tf.function(step)
    whole = tf.function(lambda *args: strategy.run(step, args))
    return [
        error_of(strategy.run, step, args),
        error_of(strategy.run, traced, args),
        error_of(whole, *args),
    ]


@observed
def contexts(strategy):
    def where():
        return [
            tf.distribute.get_strategy() is strategy,
            tf.distribute.has_strategy(),
            tf.distribute.in_cross_replica_context(),
            replica() is None,
        ]

    def inside():
        context = replica()
        return {
            "id": context.replica_id_in_sync_group,
            "number": context.num_replicas_in_sync,
            "devices": len(context.devices),
            "same": context.strategy is strategy,
            "where": where(),
        }

    with strategy.scope() as entered:
        found = [entered is strategy, where()]
        with strategy.scope():
            found.append(where())
    try:
        tf.distribute.experimental_set_strategy(strategy)
        found.append(where())
    finally:
        tf.distribute.experimental_set_strategy(None)
    return [
        found,
        where(),
        strategy.num_replicas_in_sync,
        len(strategy.extended.worker_devices),
        list(strategy.extended.parameter_devices),
        everyhow(strategy, inside),
        # A strategy in itself.
        everyhow(strategy, lambda: strategy.run(lambda: tf.constant(1.0))),
    ]


def ragged(strategy):
    """Of replica k there are k + 1 rows: a mean has to count them."""
    return of_each(strategy, lambda k: tf.ones([k + 1, 2]) * k)


@observed
def reduce(strategy):
    values = {
        dtype: numbers(strategy, (2, 3), dtype)
        for dtype in ("float32", "bfloat16", "int32", "int64")
    }
    tried = [(name, axis) for name in values for axis in (None, 0, 1, -1)]
    values |= {
        "ragged": ragged(strategy),
        "tensor": tf.constant([1.0, 2.0]),
        "number": 3.0,
        "none": None,
        "bool": tf.constant(True),
    }
    others = [(name, None) for name in ("tensor", "number", "none", "bool")]

    def reduced(op, name, axis):
        found = strategy.reduce(op, values[name], axis=axis)
        return tf.cast(found, "float64") if (name, axis) in tried else found

    return {
        f"{op} {name} {axis}": error_of(reduced, op, name, axis)
        for op in ("SUM", "mean")
        for name, axis in [*tried, ("ragged", 0), *others]
    }


@observed
def reduce_in_a_function(strategy):
    @tf.function
    def total(value):
        each = strategy.run(lambda x: {"a": x * x, "b": [x]}, (value,))
        return [
            tf.nest.map_structure(
                lambda v, op=op: strategy.reduce(op, v, axis=None), each
            )
            for op in tf.distribute.ReduceOp
        ]

    return total(numbers(strategy, (3,)))


@observed
def gather(strategy):
    inside = tf.function(lambda v: strategy.gather(v, axis=0))
    same, other = numbers(strategy, (2, 2)), ragged(strategy)
    tried = [
        *((same, axis) for axis in (0, 1, 2)),
        *((other, axis) for axis in (0, 1)),
        (numbers(strategy), 0),
        (tf.ones([2]), 0),
    ]
    found = [error_of(strategy.gather, value, axis) for value, axis in tried]
    return [*found, inside(other)]


def reduced(strategy, values):
    """What all-reduces of values are that functions make on a replica."""
    return {
        f"{op} {name}": everyhow(
            strategy, lambda o=op, v=value: replica().all_reduce(o, v())
        )
        for op in ("SUM", "MEAN")
        for name, value in values.items()
    }


@observed
def all_reduce(strategy):
    def nested(dtype):
        mine = number(dtype)
        return {"a": mine, "b": [tf.fill([2, 3], mine), mine * 2]}

    dtypes = "float32", "float16", "int32", "int64"
    values = {dtype: functools.partial(nested, dtype) for dtype in dtypes}
    return reduced(strategy, values)


@observed
def all_reduce_of_odd_values(strategy):
    constant = tf.constant(2.0)
    values = {
        "one object": lambda: constant,
        "python": lambda: 3.0,
        "none": lambda: None,
        "empty": list,
        "sparse": lambda: tf.IndexedSlices(
            tf.fill([1, 2], number()),
            tf.reshape(number("int32"), [1]),
            tf.constant([5, 2]),
        ),
    }
    return reduced(strategy, values)


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
        everyhow(strategy, functools.partial(step, *options))
        for options in ((0, True), (1, False))
    ]
