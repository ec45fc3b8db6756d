"""What a gather of weights waits for."""

import types

import tensorflow as tf

from keras_towers.fit.step.pace import Pace


def exchange(kind, on_towers=True, of_batch=False):
    given = types.SimpleNamespace(on_towers=on_towers, of_batch=of_batch)
    return types.SimpleNamespace(kind=kind, given=given)


GATHER, SCATTER = exchange("gather"), exchange("scatter")
OF_BATCH = exchange("gather", of_batch=True)


def waits_of(levels):
    """For the exchanges of each level, the names of what they wait for."""
    everything = [e for exchanges in levels for e in exchanges]
    pace = Pace(types.SimpleNamespace(exchanges=everything))
    waits = []
    with tf.Graph().as_default():
        for level, exchanges in enumerate(levels):
            pace.note_computed([tf.constant(0.0, name=f"computed{level}")])
            with pace.before_exchanges(exchanges):
                result = tf.constant(0.0, name=f"exchanged{level}")
            pace.note_exchanged([result] if exchanges else [])
            pace.end_level()
            waits.append(before(result.op))
    return waits


def before(operation):
    """The names of all that has run when an operation runs."""
    found, left = set(), [*operation.control_inputs]
    while left:
        one = left.pop()
        if one.type != "NoOp":
            found.add(one.name)
        left += one.control_inputs
    return found


def test_a_gather_waits_for_the_level_before_the_last_one():
    waits = waits_of([[GATHER], [GATHER, SCATTER], [GATHER], [GATHER]])
    assert waits == [
        set(),
        {"computed0"},
        {"computed0", "computed1", "exchanged0"},
        {"computed0", "computed1", "computed2", "exchanged0", "exchanged1"},
    ]


def test_only_gathers_of_weights_wait():
    assert waits_of([[SCATTER], [OF_BATCH], [SCATTER]]) == [set()] * 3
    assert waits_of([[GATHER], [SCATTER], [OF_BATCH]]) == [set()] * 3
