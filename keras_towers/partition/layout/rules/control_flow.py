"""Branches and calls of functions, and code that all loops share.

A called function is inlined, unless XLA compiles it apart from the rest. Such
functions, and those of branches, take values of the surrounding program as
inputs. No exchange is possible inside of them. ``loops.py`` has the loops.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.builder import Output
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    ListOf,
    Sharded,
    local_shape,
)
from keras_towers.partition.ir.program import (
    Attributes,
    Function,
    Operation,
    Tensor,
    needed_operations,
)
from keras_towers.partition.ir.reasons import (
    NotDivided,
    asserted,
    require,
    unless_none,
)
from keras_towers.partition.ir.registry import operation
from keras_towers.partition.ir.values import (
    Value,
    Values,
    common_facts,
    have_same_facts,
    replicated,
)
from keras_towers.partition.layout.layout_pass import lay_out_function
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.units import Units

_K = TypeVar("_K")
_R = TypeVar("_R")
# In the control flow of TensorFlow 1, an operation may have no result, and
# loops are cycles of the graph.
_CONTROL_FLOW_V1 = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "Ref")
    for name in ("Enter", "Exit", "Merge", "NextIteration", "Switch")
)


# Enough passes for the layouts of a loop to settle.
_PASSES = 8
# The attributes that a call has as in the trace.
_KEPT = """
    Tcond config_proto executor_type parallel_iterations
    _lower_using_switch_merge _xla_propagate_compile_time_consts _XlaMustCompile
"""


def has_control_flow_v1(graph: tf.Graph) -> bool:
    """Whether a graph has loops or branches of TensorFlow 1.

    They cannot be separated from their graph.
    """
    return any(o.type in _CONTROL_FLOW_V1 for o in graph.get_operations())


def called_graph(node: Node, name: str, num_extra: int = 0) -> tf.Graph:
    """Return the graph of a function that an operation calls.

    Args:
        node: the operation.
        name: the name of the function.
        num_extra: the number of first inputs that the function does not take.

    Raises:
        NotDivided: the function is unknown, or cannot be laid out.
    """
    graph = compat.graph_of_function(node.operation.graph, name)
    graph = unless_none(graph, "{} calls a function that is not known")
    require(len(graph.inputs) == len(node.operation.inputs) - num_extra)
    require(not has_control_flow_v1(graph), "{} calls loops of TensorFlow 1")
    return graph


# ---- calls -------------------------------------------------------------------


# The graphs of ``_mean_of_rows``, which nothing else calls.
_OWN_MEANS: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


@tf.custom_gradient
def own_mean(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Return for each row the mean of all rows of its tower.

    On one device it is the mean of all rows. The operator is linear and
    self-adjoint, so it is its own gradient.

    Args:
        x: the rows, along axis 0.
    """
    return _mean_of_rows(x), own_mean


@tf.function(autograph=False)
def _mean_of_rows(x: tf.Tensor) -> tf.Tensor:
    _OWN_MEANS.add(compat.get_default_graph())
    return tf.broadcast_to(tf.reduce_mean(x, 0, keepdims=True), tf.shape(x))


def _mean_of_own_rows(node: Node, *inputs: Value) -> Values:
    """Compute ``own_mean`` on each tower, without an exchange."""
    builder = node.builder
    require(_function_of(node) in _OWN_MEANS)
    (x,) = inputs
    layout, rows = x.as_rows()
    require(not layout.axis and layout.blocks == 1)
    mean = builder.op("Mean", [rows, [0]], keep_dims=True)
    shape = builder.shape_vector(rows)
    # Without rows, the broadcast drops the mean, which is NaN.
    means = builder.op("BroadcastTo", [mean, shape], rows.shape)
    return [Value(layout, means, shape=x.shape)]


def _call(node: Node, *inputs: Value) -> Values:
    graph = _function_of(node)
    if node.must_be_compiled:
        # Without XLA, some operations have no kernel, and draws differ.
        lay_out = functools.partial(_lay_out_functions, node, [graph], xla=True)
        return try_with_partial_sums(node, inputs, lay_out)
    outputs = lay_out_function(node.scope, graph, inputs)
    # A gradient may have added outputs to the graph after this call.
    return outputs[: node.num_outputs]


def _function_of(node: Node) -> tf.Graph:
    """Return the graph of a called function."""
    has_name = node.type.endswith("PartitionedCall")
    return called_graph(node, node.attr("f").name if has_name else node.type)


def bind_captures(
    functions: Sequence[Function],
) -> tuple[list[Function], list[Tensor]]:
    """Turn captured tensors into inputs of functions.

    Args:
        functions: N functions, which may contain unused operations.

    Returns:
        The N functions, and the tensors that all of them take as last inputs.
    """
    captured = [needed_operations(f, _is_rematerialized) for f in functions]
    captures = list(dict.fromkeys(t for _, others in captured for t in others))
    closures = [
        Function([*function.inputs, *captures], function.outputs, operations)
        for function, (operations, _) in zip(functions, captured, strict=True)
    ]
    return closures, captures


def _is_rematerialized(operation: Operation) -> bool:
    """Whether a function repeats an operation instead of capturing its output.

    Single numbers are captured unless they are constants: they come from large
    tensors, and do not determine shapes.
    """
    is_number = operation.outputs[0].shape.rank == 0
    return operation.is_repeated and (
        operation.type == "Const" or not is_number
    )


def add_call(
    node: Node,
    inputs: Sequence[Tensor],
    attributes: Attributes,
    outputs: Sequence[Output],
    functions: Mapping[str, object],
) -> list[Tensor]:
    """Add an operation that calls functions; return its outputs.

    Args:
        node: the traced operation.
        inputs: its inputs.
        attributes: the attributes that name dtypes.
        outputs: the dtypes and shapes of its outputs.
        functions: the functions that it calls, by attribute.
    """
    traced = node.operation.node_def.attr
    has_shapes = "output_shapes" in traced
    return node.builder.add(
        node.type,
        inputs,
        {
            **attributes,
            **{key: traced[key] for key in _KEPT.split() if key in traced},
            "output_shapes" if has_shapes else "_output_shapes": [
                shape for _, shape in outputs
            ],
        },
        outputs,
        functions=functions,
        source=node.operation,
    )


# ---- values in functions -----------------------------------------------------


def uses_variables(inputs: Values) -> bool:
    """Whether functions with these inputs may read or write variables."""
    handles = [v.whole.handle for v in inputs if v.whole is not None]
    return any(handle is not None for handle in handles)


def require_towers_differ(values: Values) -> None:
    """Refuse to divide work that would be the same on all towers.

    Computing it once saves tracing time, too: a loop lays out its body several
    times, and the loops in the body as well.
    """
    require(not all(value.is_replicated for value in values))


def join_values(a: Value, b: Value) -> Value:
    """Join two possible values, as at the end of a branch.

    The result has their layout, and the facts that both share.

    Raises:
        NotDivided: they have different layouts.
    """
    layouts = [v.layout for v in (a, b) if not v.is_replicated]
    is_same = all(layout == layouts[0] for layout in layouts)
    require(is_same, "{} may return values in two layouts")
    return common_facts(a, b, layouts[0] if layouts else REPLICATED)


def try_with_partial_sums(
    node: Node, inputs: Values, lay_out: Callable[[Values], Values]
) -> Values:
    """Lay out a call with its partial sums; if that fails, sum them first.

    Args:
        node: the call.
        inputs: the inputs of the functions.
        lay_out: lays it out, given the inputs.

    Raises:
        NotDivided: the call has to be computed once.
    """
    scope = node.scope
    before = scope.computed_once.copy()
    while True:
        try:
            return lay_out(inputs)
        except NotDivided:
            scope.restore_computed_once(before)
            parts = [value for value in inputs if value.is_partial]
            if not parts:
                raise
        for value in parts:
            node.converter.assemble(value)


def _lay_out_functions(
    node: Node,
    graphs: Sequence[tf.Graph],
    inputs: Values,
    first: Sequence[Tensor] = (),
    **options: object,
) -> Values:
    """Lay out several functions, one of which an operation calls.

    Args:
        node: the operation.
        graphs: the functions.
        inputs: their inputs.
        first: the first inputs of the operation, which they do not take.
        **options: the options of their layout that differ.

    Raises:
        NotDivided: the call has to be computed once.
    """
    insides = [node.scope.of_function(**options) for _ in graphs]
    ends = []
    for inside, graph in zip(insides, graphs, strict=True):
        captured = [node.converter.captured(value) for value in inputs]
        outputs = lay_out_function(inside, graph, captured)
        # A gradient may have added outputs to the graph after this call.
        ends.append([*outputs[: node.num_outputs]])
    # A function that does not write a variable returns what it holds.
    written = list(
        dict.fromkeys(h for i in insides for h in i.variables.contents)
    )
    handles = [Value(REPLICATED, whole=handle) for handle in written]
    for inside, values in zip(insides, ends, strict=True):
        values += map(inside.variables.content_of, handles)
    results = [
        functools.reduce(join_values, values, values[0])
        for values in map(_used, zip(*ends, strict=True))
    ]
    for handle, content in zip(
        handles, results[node.num_outputs :], strict=True
    ):
        rows = node.variables.rows_of(handle)
        require(content.is_replicated or content.layout == rows)
    # In a function, what is computed once could not be exchanged.
    if node.builder.can_exchange and not uses_variables(inputs):
        require_towers_differ(results)
    _require_known_units(node.units, results)
    functions = []
    for inside, values in zip(insides, ends, strict=True):
        tensors = [
            asserted(value.whole)
            if _is_never_used(value)
            else inside.converter.to_layout(value, result.layout)
            for value, result in zip(values, results, strict=True)
        ]
        functions.append(Function((), tensors, inside.builder.operations))
    bound, captures = bind_captures(functions)
    traced = [(t.dtype, t.shape) for t in node.operation.outputs]
    traced += [handle.type_of_content for handle in written]
    specs = [
        (dtype, local_shape(shape, result.layout))
        for (dtype, shape), result in zip(traced, results, strict=True)
    ]
    attributes = {
        "Tin": [tensor.dtype for tensor in captures],
        "Tout": [dtype for dtype, _ in traced],
    }
    by_name = _by_attribute(node, bound)
    operands = [*first, *captures]
    tensors = add_call(node, operands, attributes, specs, by_name)
    results = [
        replicated(tensor, result)
        if result.layout == REPLICATED
        else dataclasses.replace(result, local=tensor)
        for result, tensor in zip(results, tensors, strict=True)
    ]
    contents = results[node.num_outputs :]
    for handle, content in zip(handles, contents, strict=True):
        node.variables.assign(handle, content)
    return results[: node.num_outputs]


def _is_never_used(value: Value) -> bool:
    """Whether a branch returns a value in place of one of the other branch.

    For XLA, branches return what their gradients need. So such a value has any
    layout, and no facts.
    """
    operation = None if value.whole is None else value.whole.operation
    return operation is not None and operation.type == "FakeParam"


def _used(values: Values) -> Values:
    """Return those of several branches' values that may be used, or all."""
    return [v for v in values if not _is_never_used(v)] or values


def _by_attribute(
    node: Node, functions: Sequence[Function]
) -> Mapping[str, Function | Sequence[Function]]:
    """Return the functions of an operation by the names of its attributes."""
    if node.type.endswith("Case"):
        return {"branches": functions}
    if node.type.endswith("PartitionedCall"):
        return {"f": functions[0]}
    names = ("else_branch", "then_branch")
    return dict(zip(names, functions, strict=True))


def _require_known_units(units: Units, values: Values) -> None:
    """Refuse rows whose unit is known only inside the function."""
    for value in values:
        layout = value.layout
        while isinstance(layout, ListOf):
            layout = layout.element
        if isinstance(layout, Sharded):
            require(units.has_unit(layout.unit))


# ---- branches ----------------------------------------------------------------


def _branches(node: Node, index: Value, *inputs: Value) -> Values:
    graphs = [called_graph(node, name, 1) for name in _branch_names(node)]
    number = index.number
    if isinstance(number, (bool, int)) and index.shape == ():
        # An index that is out of range selects the last branch.
        taken = int(number) if 0 <= number < len(graphs) else -1
        return lay_out_function(node.scope, graphs[taken], inputs)[
            : node.num_outputs
        ]
    if not uses_variables(inputs):
        require_towers_differ([index, *inputs])
    # All towers take the same branch.
    first = [node.converter.replicate(index)]
    lay_out = functools.partial(_lay_out_functions, node, graphs, first=first)
    return try_with_partial_sums(node, inputs, lay_out)


def _branch_names(node: Node) -> list[str]:
    if node.type.endswith("Case"):
        return [branch.name for branch in node.attr("branches")]
    return [node.attr(f"{name}_branch").name for name in ("else", "then")]


# ---- loops, whichever rounds a tower runs ------------------------------------


def loop_variables(body: tf.Graph) -> list[int]:
    """Return the indices of the inputs that a round of the loop may change."""
    return [
        index
        for index, tensor in enumerate(body.outputs)
        if skip_identities(tensor) is not body.inputs[index]
    ]


def skip_identities(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that a chain of identities copies."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def settle(
    variables: Mapping[_K, Value],
    lay_out_round: Callable[
        [Mapping[_K, Value]], tuple[_R, Mapping[_K, Value]]
    ],
) -> tuple[_R, Mapping[_K, Value]]:
    """Find a layout of each loop variable that is the same after a round.

    Args:
        variables: the initial loop variables, by their keys.
        lay_out_round: lays out a round; returns a result, and the loop
            variables joined with those after the round.

    Returns:
        The last result, and the loop variables.

    Raises:
        NotDivided: they do not settle.
    """
    for _ in range(_PASSES):
        result, after = lay_out_round(variables)
        if after.keys() == variables.keys() and all(
            have_same_facts(variables[k], after[k]) for k in variables
        ):
            return result, variables
        variables = after
    raise NotDivided("the layouts in rounds of {} do not settle")


def add_loop(
    node: Node, loop_vars: Sequence[Tensor], body: Function, condition: Function
) -> list[Tensor]:
    """Add a loop; return its outputs, the loop variables first.

    Args:
        node: the traced loop.
        loop_vars: the N initial loop variables.
        body: takes the loop variables, and returns new ones.
        condition: takes the loop variables; returns whether to continue.
    """
    (body, condition), captures = bind_captures([body, condition])
    body = dataclasses.replace(body, outputs=[*body.outputs, *captures])
    operands = [*loop_vars, *captures]
    return add_call(
        node,
        operands,
        {"T": [tensor.dtype for tensor in operands]},
        [(tensor.dtype, tensor.shape) for tensor in body.inputs],
        {"body": body, "cond": condition},
    )


# ---- what is known of them ---------------------------------------------------

operation("Assert", effect="checks")
operation("FractionalAvgPool FractionalMaxPool ReadFile", effect="once")
operation("PartitionedCall StatefulPartitionedCall", _mean_of_own_rows, _call)
operation("If StatelessIf Case StatelessCase", _branches)
