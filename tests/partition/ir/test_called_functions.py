"""Functions of the trace, read as those of a program."""

import tensorflow as tf

from keras_towers.partition.ir.axes import ONCE
from keras_towers.partition.ir.called_functions import CalledFunctions
from keras_towers.partition.ir.program import Operation


def called_by(type_, attributes, graphs=()):
    call = Operation(type_, (), attributes, [], ONCE)
    return CalledFunctions(graphs).of(call)


def as_text(function):
    """Each operation, and the results, with where they come from."""
    names = {t: f"input {k}" for k, t in enumerate(function.inputs)}
    for operation in function.operations:
        for tensor in operation.outputs:
            names[tensor] = f"{operation.type}:{tensor.index}"
    lines = [
        f"{o.type}({', '.join(names[t] for t in o.inputs)})"
        for o in function.operations
    ]
    return lines, [names[t] for t in function.outputs]


def test_a_branch_has_the_operations_inputs_and_results_of_its_graph():
    @tf.function
    def divided(x, y):
        def branch():
            least, most = tf.split(tf.concat([x, y], 0), [1, 1])
            return most, tf.cast(least, tf.int32), y

        return tf.cond(x[0] > 0, branch, lambda: (x, tf.constant([1]), y))

    spec = tf.TensorSpec([1])
    graph = divided.get_concrete_function(spec, spec).graph
    (operation,) = [o for o in graph.get_operations() if "If" in o.type]
    attributes = operation.node_def.attr
    branches = called_by(operation.type, attributes, [graph])
    other, branch = sorted(branches, key=lambda f: len(f.operations))
    lines, results = as_text(branch)
    assert "ConcatV2(input 0, input 1, Const:0)" in lines
    assert "Cast(SplitV:0)" in lines
    assert results == ["Identity:0"] * 3
    dtypes = [tensor.dtype for tensor in branch.outputs]
    assert dtypes == [tf.float32, tf.int32, tf.float32]
    assert len(other.outputs) == 3


def test_an_unknown_function_is_none():
    """The type of a legacy call is the name of the function."""
    assert called_by("no_such_function", {}) == [None]
