"""Observations of the public surface of a strategy, as values to compare.

An observation takes a strategy and gives a structure of NumPy values and
strings: what stock MirroredStrategy gives for it, a tower strategy has to give.
What is inherited as it is, such as the kinds of variables or how datasets are
distributed, is for the tests of TensorFlow and Keras.
"""

import tensorflow as tf

OBSERVATIONS = {}
OPERATIONS = ("SUM", "MEAN")


def observed(function):
    OBSERVATIONS[function.__name__] = function
    return function


def plain(value):
    """Turn what a strategy gives into values that can be compared."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, tf.distribute.DistributedValues):
        return plain(list(value.values))
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.IndexedSlices):
        return plain(tf.convert_to_tensor(value))
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value.numpy()
    return value


def replica():
    return tf.distribute.get_replica_context()


def number(dtype="float32"):
    """The number of this replica, from 1."""
    return tf.cast(replica().replica_id_in_sync_group + 1, dtype)


def numbers(strategy, shape=(), dtype="float32"):
    """One value for each replica: its number, from 1."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: tf.fill(
            shape, tf.constant(c.replica_id_in_sync_group + 1, dtype)
        )
    )


def error_of(function):
    """The outcome, or the class of the error that it ends in."""
    try:
        return plain(function())
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
        error_of(lambda: strategy.run(step, args)),
        error_of(lambda: strategy.run(traced, args)),
        error_of(lambda: whole(*args)),
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
    return strategy.experimental_distribute_values_from_function(
        lambda c: (
            tf.ones([c.replica_id_in_sync_group + 1, 2])
            * c.replica_id_in_sync_group
        )
    )


@observed
def reduce(strategy):
    found = {}
    for op in ("SUM", "mean"):
        values = {
            dtype: numbers(strategy, (2, 3), dtype)
            for dtype in ("float32", "bfloat16", "int32", "int64")
        }
        values["ragged"] = ragged(strategy)
        for name, value in values.items():
            for axis in (None, 0, 1, -1):
                if name != "ragged" or axis == 0:
                    found[f"{op} {name} {axis}"] = error_of(
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
            for op in tf.distribute.ReduceOp
        ]

    return total(numbers(strategy, (3,)))


@observed
def gather(strategy):
    inside = tf.function(lambda v: strategy.gather(v, axis=0))
    same, other = numbers(strategy, (2, 2)), ragged(strategy)
    return [
        *[error_of(lambda a=a: strategy.gather(same, a)) for a in (0, 1, 2)],
        *[error_of(lambda a=a: strategy.gather(other, a)) for a in (0, 1)],
        inside(other),
        error_of(lambda: strategy.gather(numbers(strategy), 0)),
        error_of(lambda: strategy.gather(tf.ones([2]), 0)),
    ]


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
        for dtype in ("float32", "float16", "int32", "int64")
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
        for axis, ragged in ((0, True), (1, False))
    ]
