"""Observations of variables of all kinds."""

import itertools
import tempfile

import tensorflow as tf

from tests.compatibility.observing import (
    error_of,
    number,
    observed,
    plain,
)

# Whole numbers are only of interest where there is a mean to take.
KINDS = [
    *itertools.product(
        tf.VariableSynchronization, tf.VariableAggregation, ("float32",)
    ),
    *itertools.product(
        tf.VariableSynchronization, [tf.VariableAggregation.MEAN], ("int64",)
    ),
]


def _kind(synchronization, aggregation, dtype):
    return f"{synchronization.name} {aggregation.name} {dtype}"


def _each_kind(strategy, observe):
    found = {}
    for kind in KINDS:

        def look(kind=kind):
            synchronization, aggregation, dtype = kind
            with strategy.scope():
                variable = tf.Variable(
                    tf.constant([4, 8], dtype),
                    synchronization=synchronization,
                    aggregation=aggregation,
                )
            return observe(variable)

        found[_kind(*kind)] = error_of(look)
    return found


def _state(strategy, variable):
    with strategy.scope():
        return [
            variable.values,
            error_of(lambda: variable.read_value()),
            error_of(lambda: variable + variable),
            error_of(lambda: strategy.extended.read_var(variable)),
        ]


@observed
def variables_of_all_kinds(strategy):
    def observe(variable):
        return [
            type(variable).__name__,
            variable.synchronization.name,
            variable.aggregation.name,
            variable.trainable,
            variable.dtype.name,
            [v.device for v in variable.values],
            _state(strategy, variable),
        ]

    return _each_kind(strategy, observe)


def _writes(variable, value):
    value = tf.cast(value, variable.dtype)
    return {
        "assign": lambda: variable.assign(variable * 0 + value),
        "assign_add": lambda: variable.assign_add(variable * 0 + value),
        "assign_sub": lambda: variable.assign_sub(variable * 0 + value),
        "unread": lambda: variable.assign_add(
            variable * 0 + value, read_value=False
        ),
    }


@observed
def variables_written_across_replicas(strategy):
    def observe(variable):
        found = []
        for name in _writes(variable, 2):
            with strategy.scope():
                write = _writes(variable, 2)[name]
                found.append(error_of(lambda w=write: w() and None))
            found.append(_state(strategy, variable))
        return found

    return _each_kind(strategy, observe)


@observed
def variables_written_by_replicas(strategy):
    def observe(variable):
        found = []
        for name in ("assign", "assign_add", "assign_sub", "unread"):

            def step(name=name):
                _writes(variable, number())[name]()
                return variable.read_value()

            found.append(error_of(lambda s=step: strategy.run(s)))
            if name == "assign_add":
                whole = tf.function(lambda s=step: strategy.run(s))
                found.append(error_of(whole))
            found.append(_state(strategy, variable))
        return found

    return _each_kind(strategy, observe)


@observed
def variables_scattered_by_replicas(strategy):
    def observe(variable):
        def step():
            slices = tf.IndexedSlices(
                tf.reshape(number(variable.dtype), [1]), [1], [2]
            )
            return variable.scatter_add(slices) is None

        return error_of(lambda: strategy.run(step)), variable.values

    return _each_kind(strategy, observe)


@observed
def variable_made_by_replicas(strategy):
    made = []

    def step():
        if not made:
            variable = tf.Variable(number())
            made.append(variable)
            return variable
        return made[0] + 1.0

    return strategy.run(step), strategy.run(lambda: made[0] * 2.0)


@observed
def checkpoint(strategy):
    with strategy.scope():
        first = tf.Variable([1.0, 2.0])
        second = tf.Variable(
            3.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    strategy.run(lambda: second.assign_add(number()))
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(a=first, b=second).write(f"{folder}/c")
        first.assign([0.0, 0.0])
        tf.train.Checkpoint(a=first, b=second).read(saved)
        alone = tf.Variable([0.0, 0.0]), tf.Variable(0.0)
        tf.train.Checkpoint(a=alone[0], b=alone[1]).read(saved)
    return plain([first.values, second.values, *alone])
