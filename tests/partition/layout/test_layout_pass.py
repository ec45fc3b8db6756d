"""In which order operations are laid out, and when variables are read."""

import types

import pytest
import tensorflow as tf

from keras_towers.partition import partition_graph
from keras_towers.partition.ir.layouts import REPLICATED, InShards, Sharded
from keras_towers.partition.layout.layout_pass import sort_topologically
from tests.partition.kit import (
    check_on_towers,
    computed_once,
    earliest,
    exchange_counts,
    laid_out,
    results_of,
    sharded,
    trace,
)
from tests.partition.layout_list import as_listed

X, COLUMNS = sharded(-1, 4), sharded(4, -1)
KNOWN = sharded(-1, 4, examples=6)


def _operation(name, *sources):
    inputs = [types.SimpleNamespace(name=f"{o.name}:0", op=o) for o in sources]
    return types.SimpleNamespace(name=name, inputs=inputs)


def test_operations_come_after_those_that_they_need_each_once():
    """However they were created; some are needed twice."""
    first = _operation("first")
    left, right = _operation("left", first), _operation("right", first)
    both = _operation("both", left, right, first)
    last = _operation("last", left, both)
    given = [last, right, both, first, left]
    found = [o.name for o in sort_topologically(given, {})]
    assert sorted(found) == sorted(o.name for o in given)
    for operation in given:
        for tensor in operation.inputs:
            assert found.index(tensor.op.name) < found.index(operation.name)


@pytest.mark.parametrize(
    ("layout", "level"), [(REPLICATED, 2), (InShards(0, 3), 0)]
)
def test_whole_weights_are_read_once_all_gradients_are_there(layout, level):
    variable = tf.Variable(tf.ones([3]))

    def step(x):
        first = tf.reduce_sum(x, 0)
        second = tf.reduce_sum(tf.exp(x - first), 0)
        given = tf.raw_ops.IdentityN(input=[first, second], name="handed")
        with tf.name_scope("update"):
            variable.assign(variable * 0.5 + given[0])
        return given

    graph = trace(step, sharded(-1, 3))
    names = [operation.name for operation in graph.get_operations()]
    updates = {name: "" for name in names if name.startswith("update/")}
    handed = {"handed": [layout] * 2}
    layouts = [Sharded(0), REPLICATED]
    program = partition_graph(graph, layouts, graph.outputs, handed, updates)
    (read,) = [o for o in program.operations if o.type == "ReadVariableOp"]
    assert earliest(program).levels[read] == level


# The first result says how it is laid out, the second one what has its rows.
HANDED_BACK = {
    "rows": lambda x: 2 * tf.sort(x, 0),
    "columns": lambda columns: 2 * tf.sort(columns, 1),
    "of the input with rows": lambda x: tf.sort(x, 0) - tf.sort(-x, 0),
    "a number of rows that is known": lambda known: 2 * tf.sort(known, 0),
    "as many as rows": (
        lambda x: x @ tf.linalg.qr(x)[1],
        sharded(-1, 6, examples=6),
    ),
    "not all rows": lambda x: 2 * tf.sort(x, 0)[:2],
    "none": lambda x: 2 * tf.unique(x[:, 0])[0],
    "values and their places": lambda x: tf.math.top_k(tf.transpose(x), 1),
}


test_rows_are_handed_back_of_what_is_computed_once = as_listed(
    "layout_pass: handed back", HANDED_BACK, exchanges=True
)


def test_a_loop_gets_whole_weights():
    """It cannot gather them, and is divided all the same."""
    weight = tf.Variable(tf.ones([4, 4]))

    def step(x):
        def body(k, y):
            return k + 1, y @ weight

        return tf.while_loop(lambda k, y: k < 2, body, (0, x))[1]

    program = laid_out(step, X, captured=InShards(0, 4))
    assert not computed_once(program)
    assert exchange_counts(program) == {"gather": 2}


@pytest.mark.parametrize(
    ("xla", "acts", "has_handles"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
def test_xla_compiles_functions_of_what_variables_hold(xla, acts, has_handles):
    """But for what acts, which one device does."""
    weight = tf.Variable(tf.ones([4, 4]))

    def step(x):
        def sort():
            if acts:
                tf.print(x)
            return tf.sort(x, 0) @ weight

        return tf.cond(tf.reduce_sum(x) > 0, sort, lambda: -x)

    program = laid_out(step, X, xla=xla)
    (branch,) = (o for o in program.operations if o.functions or "If" in o.type)
    found = any(t.dtype == tf.resource for t in branch.inputs)
    assert found == has_handles


def test_shapes_are_completed_of_each_result():
    """Also after one of unknown rank, and after a list."""

    def step(x):
        array = tf.TensorArray(tf.float32, 2, element_shape=[None, 4])

        def body(k, array, y):
            return k + 1, array.write(k, y), tf.tanh(y)

        loop = tf.while_loop(lambda k, *_: k < 2, body, (0, array, x))
        unknown = tf.raw_ops.PlaceholderWithDefault(input=x, shape=None)
        both = tf.raw_ops.IdentityN(input=[unknown, x])
        return loop[1].stack(), loop[2], both[1]

    program = check_on_towers(step, X)
    shapes = [value.shape for value in results_of(program)]
    n = program.values[program.graphs[0].inputs[0].name].shape[0]
    assert shapes[1:] == [(n, 4), (n, 4)]
