"""What a program is given, by the layouts of a graph's inputs."""

import pytest
import tensorflow as tf

from keras_towers.partition import partition_graph
from keras_towers.partition.ir.layouts import (
    FIXED,
    MIRRORED,
    PARTIAL,
    REPLICATED,
    AllExamples,
    InShards,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
)
from tests.partition.kit import laid_out, sharded
from tests.partition.layout_list import described

INPUTS = {
    "rows": ("rows 0 of [n, 3]", Sharded(0), [None, 3]),
    "rows with an unknown size": (
        "rows 0 of [n, 0.1, 3] 0.1",
        Sharded(0),
        [None, None, 3],
    ),
    "columns": ("rows 1 of [0.0, n] 0.0", Sharded(1), [None, None]),
    "a known number of rows": ("rows 0 of [6, 3]", Sharded(0), [6, 3]),
    "several rows of each example": (
        "rows 0 of [6*n, 3] in 2 blocks",
        Sharded(0, None, 2, 3),
        [None, 3],
    ),
    "a known number of several": (
        "rows 1 of [3, 12] in 2 blocks",
        Sharded(1, None, 2, 3),
        [3, 12],
    ),
    "rows of another unit": (
        "rows 0 of [*found0, 3]",
        Sharded(0, "entries"),
        [None, 3],
    ),
    "a sum": ("sum of [0.0, 3] 0.0", PARTIAL, [None, 3]),
    "a whole": ("whole [?, 3]", REPLICATED, [None, 3]),
    "all examples": ("whole [n, 0.1] 0.1", AllExamples(), [None, None]),
    "a known number of all examples": ("whole [6, 3]", AllExamples(), [6, 3]),
    "what never changes": ("whole [?]", FIXED, [None]),
    "a copy of each tower": ("whole [2, ?]", MIRRORED, [2, None]),
    "row splits": ("whole [n+1]", RowSplits("entries"), [None]),
    "indices": ("rows 0 of [*found0, 2]", SparseIndices("entries"), [None, 2]),
    "a sparse shape": ("whole [2]", SparseShape((None,)), [2]),
    "a sparse shape of known sizes": ("whole [3]", SparseShape((5, 7)), [3]),
}
_INTEGERS = RowSplits, SparseIndices, SparseShape


def _program(layout, shape):
    dtype = tf.int64 if isinstance(layout, _INTEGERS) else tf.float32
    graph = tf.Graph()
    with graph.as_default():
        given = tf.compat.v1.placeholder(dtype, shape)
    graph.inputs = graph.outputs = [given]
    return partition_graph(graph, [layout], graph.outputs)


@pytest.mark.parametrize("name", INPUTS)
def test_an_input(name):
    wanted, layout, shape = INPUTS[name]
    program = _program(layout, shape)
    sizes = sorted(program.inputs.sizes)
    assert " ".join([described(program), *sizes]) == wanted


def test_the_known_entries_of_a_sparse_shape():
    program = _program(SparseShape((None, 7)), [3])
    (value,) = program.values.values()
    first, middle, last = value.known
    assert (str(first), str(middle), last) == ("n", "?", 7)


def test_what_nobody_needs_is_left_out():
    def function(x):
        _ = tf.sin(x) + tf.unique(x[:, 0])[0][0]
        return tf.reduce_sum(tf.cos(x))

    program = laid_out(function, sharded(-1, 3))
    types = {operation.type for operation in program.operations}
    assert "Cos" in types and not types & {"Sin", "Unique"}
    assert [e.kind for e in program.exchanges] == ["sum"]
    assert not program.computed_once


def _rounded(x):
    return tf.cast(x, tf.float16)


# Which gradient the exchanges of a step are for.
GRADIENTS = {
    "a sum": (["handed:0"], lambda x: tf.reduce_sum(x, 0)),
    "a scaled sum": (["handed:0"], lambda x: tf.reduce_sum(x, 0) / 3.0),
    "terms": (
        ["handed:0"],
        lambda x: tf.reduce_sum(x, 0) + tf.reduce_sum(tf.sin(x), 0),
    ),
    "a term of its own exchange": (
        ["", "handed:0"],
        lambda x: tf.reduce_sum(x, 0) + tf.exp(tf.reduce_sum(x, 0)),
    ),
    "a sum that is rounded": (
        ["handed:0"],
        lambda x: 2 * tf.cast(_rounded(tf.reduce_sum(x, 0)), x.dtype),
    ),
    "a sum that is clipped": (
        [""],
        lambda x: tf.clip_by_norm(tf.reduce_sum(x, 0), 1.0),
    ),
    "a factor that is a sum": (
        ["", ""],
        lambda x: tf.reduce_sum(x, 0) * tf.exp(tf.reduce_sum(x)),
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_that_an_exchange_is_for(name):
    wanted, gradient = GRADIENTS[name]

    def function(x):
        return tf.raw_ops.IdentityN(input=[gradient(x)], name="handed")

    handed = {"handed": [REPLICATED]}
    program = laid_out(function, sharded(-1, 3), handed=handed)
    assert sorted(e.gradient for e in program.exchanges) == wanted


def test_variables_of_towers():
    """Each tower has a copy, or its rows, whose number is an input."""
    variable = tf.Variable(tf.ones([8, 3]))

    def function(x):
        return x @ tf.transpose(variable.read_value())

    for layout, rows in (
        (MIRRORED, 8),
        (InShards(0, 8), -1),
        (InShards(0, 8, 2), 2),
    ):
        inputs = laid_out(function, sharded(-1, 3), captured=layout).inputs
        ((index, copy),) = inputs.copies.items()
        assert index == 1
        assert [*inputs.shares] == [8] * isinstance(layout, InShards)
        (spec,) = copy.handle.shape_and_type
        assert spec.shape.dim[0].size == rows


@pytest.mark.parametrize(("layout", "is_own"), [(REPLICATED, 0), (MIRRORED, 1)])
def test_rows_that_an_update_gets(layout, is_own):
    def function(x):
        return tf.raw_ops.IdentityN(input=[2 * x], name="handed")

    handed = {"handed": [layout]}
    program = laid_out(function, sharded(-1, 3), handed=handed)
    gather = program.exchanges[0]
    assert (gather.kind, gather.is_own) == ("gather", is_own)
