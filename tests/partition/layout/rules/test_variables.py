"""Where variables are read and written of which each tower has a copy.

That all copies have the values of one device is shown by the steps of
`test_steps.py` with `updates="each"`.
"""

import collections

import pytest
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.ir.axes import SHARDS, TOWERS
from keras_towers.partition.ir.layouts import MIRRORED, InShards, Sharded
from keras_towers.partition.layout.conversions import LayoutOptions
from tests.partition.kit import exchange_counts, laid_out, sharded
from tests.partition.layout_list import described


def lay_out(function, *variables, ranks=False):
    """Lay out a function of rows and of variables with copies on towers."""
    specs = [tf.TensorSpec([None, 4])]
    graph = compat.func_graph_from_py_func(
        "one_device",
        lambda x: [*map(tf.convert_to_tensor, function(x, *variables))],
        specs,
        {},
    )
    captured = len(graph.captures)
    assert captured == len(variables)
    layouts = [Sharded(0)] + [MIRRORED] * captured
    options = LayoutOptions(axes=SHARDS if ranks else TOWERS)
    return partition_graph(graph, layouts, graph.outputs, options=options)


def types(program, on_towers):
    """How many operations of each type are done once, or by towers."""
    return collections.Counter(
        o.type for o in program.operations if ("towers" in o.axes) == on_towers
    )


SMALL, LARGE = tf.Variable(tf.ones([4, 3])), tf.Variable(tf.ones([4, 300]))


def test_towers_read_their_own_copies():
    program = lay_out(lambda x, w: [tf.reduce_sum(tf.square(x @ w))], SMALL)
    assert exchange_counts(program) == {"sum": 1}
    assert types(program, True)["ReadVariableOp"] == 1
    assert "ReadVariableOp" not in types(program, False)


def test_operations_computed_once_read_the_shared_variable():
    def function(x, large):
        return [tf.reduce_sum(x), tf.reduce_sum(large**2)]

    program = lay_out(function, LARGE)
    assert exchange_counts(program) == {"sum": 1}
    assert types(program, False)["ReadVariableOp"] == 1
    assert "ReadVariableOp" not in types(program, True)


def test_a_cast_of_a_weight_is_computed_where_it_is_needed():
    def function(x, large):
        half = tf.cast(large, tf.float16)
        rows = tf.cast(tf.cast(x, tf.float16) @ half, tf.float32)
        return [tf.reduce_sum(rows**2), tf.reduce_sum(half)]

    program = lay_out(function, LARGE)
    assert exchange_counts(program) == {"sum": 1}
    assert types(program, False)["Cast"] == 1
    assert types(program, True)["Cast"] == 3


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_a_branch_or_loop_that_draws_runs_once_and_its_values_go_to_all(
    loops, ranks
):
    def function(x, w):
        def draw():
            w.assign_add(tf.random.normal([4, 3]))
            return w * 2.0

        if loops:
            _, found = tf.while_loop(
                lambda k, _: k < 2, lambda k, _: (k + 1, draw()), [0, w + 0.0]
            )
        else:
            positive = tf.reduce_sum(x) > -100
            found = tf.cond(positive, draw, lambda: w * 1.0)
        return [tf.reduce_sum(x @ found)]

    program = lay_out(function, SMALL, ranks=ranks)
    name = "While" if loops else "If"
    assert types(program, False)[name] == 1 and name not in types(program, True)
    assert types(program, True)["AssignVariableOp"] == 1
    assert bool(exchange_counts(program)["root"]) == ranks


def test_a_generator_draws_once_and_its_state_goes_to_all_copies():
    def function(x, state):
        noise = tf.raw_ops.StatefulStandardNormalV2(
            resource=state.handle,
            algorithm=tf.constant(1, tf.int64),
            shape=tf.shape(x),
        )
        return [tf.reduce_sum(x * noise)]

    program = lay_out(function, tf.Variable([3, 5, 7], dtype=tf.int64))
    assert types(program, False)["StatefulStandardNormalV2"] == 1
    assert types(program, True)["AssignVariableOp"] == 1


@pytest.mark.parametrize(
    ("views", "wanted"), [(1, "rows 0 of [n, 3]"), (2, "sum of [2*n, 3]")]
)
def test_what_is_looked_up_in_shards_is_scattered_to_its_rows(views, wanted):
    table = tf.Variable(tf.ones([200, 3]))

    def function(ids):
        return table.sparse_read(tf.concat([ids] * views, 0))

    ids = sharded(-1, dtype="int32")
    program = laid_out(function, ids, captured=InShards(0, 200))
    assert described(program) == wanted
