"""Functions that towers call: branches, and the bodies of loops.

They take the values of the surrounding program as inputs. No exchange is
possible inside of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.builder import Output
from keras_towers.partition.layouts import (
    NotDivided,
    Value,
    have_same_facts,
    require,
    required,
)
from keras_towers.partition.program import (
    Function,
    Operation,
    Tensor,
    needed_operations,
)
from keras_towers.partition.registry import Node

# In the control flow of TensorFlow 1, an operation may have no result, and
# loops are cycles of the graph.
_CONTROL_FLOW_V1 = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "Ref")
    for name in ("Enter", "Exit", "Merge", "NextIteration", "Switch")
)


# ---- the trace ---------------------------------------------------------------


def has_control_flow_v1(graph: Any) -> bool:
    """Whether a graph has loops or branches of TensorFlow 1.

    They cannot be separated from their graph.
    """
    return any(o.type in _CONTROL_FLOW_V1 for o in graph.get_operations())


def called_graph(node: Node, name: str, num_extra: int = 0) -> Any:
    """Return the graph of a function that an operation calls.

    Args:
        node: the operation.
        name: the name of the function.
        num_extra: the number of first inputs that the function does not take.

    Raises:
        NotDivided: the function is unknown, or cannot be laid out.
    """
    graph = required(compat.graph_of_function(node.operation.graph, name))
    require(len(graph.inputs) == len(node.operation.inputs) - num_extra)
    require(not has_control_flow_v1(graph))
    return graph


def skip_identities(tensor: Any) -> Any:
    """Return the tensor that a chain of identities copies."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


# ---- values ------------------------------------------------------------------


# Enough passes for the layouts of a loop to settle.
_PASSES = 8


def settle(
    states: Mapping[int, Value],
    lay_out_round: Callable[[Mapping[int, Value]], tuple[Any, Any]],
) -> tuple[Any, Mapping[int, Value]]:
    """Find loop variables that are the same before and after a round.

    Args:
        states: the initial loop variables, by their indices.
        lay_out_round: lays out a round; returns a result, and the loop
            variables joined with those after the round.

    Returns:
        The last result, and the loop variables.

    Raises:
        NotDivided: they do not settle.
    """
    for _ in range(_PASSES):
        result, after = lay_out_round(states)
        if all(have_same_facts(states[k], after[k]) for k in states):
            return result, states
        states = after
    raise NotDivided


# ---- calls -------------------------------------------------------------------


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
    """Whether a function repeats an operation, rather than take its output.

    Single numbers are taken as inputs, unless they are constants: they are
    derived from large tensors, and do not determine shapes.
    """
    is_number = operation.outputs[0].shape.rank == 0
    return operation.is_repeated and (
        operation.type == "Const" or not is_number
    )


def add_loop(
    node: Node,
    loop_vars: Sequence[Tensor],
    body: Function,
    condition: Function,
) -> list[Tensor]:
    """Add a loop; return its outputs, of which the first are loop variables.

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


def add_call(
    node: Node,
    inputs: Sequence[Tensor],
    attributes: Mapping[str, Any],
    outputs: Sequence[Output],
    functions: Mapping[str, Any],
) -> list[Tensor]:
    """Add an operation that calls functions; return its outputs.

    Args:
        node: the traced operation.
        inputs: its inputs.
        attributes: the attributes that name dtypes.
        outputs: the dtypes and shapes of its outputs.
        functions: the functions that it calls, by attribute.
    """
    partitioner = node.partitioner
    same = ("parallel_iterations", "_lower_using_switch_merge")
    traced = node.operation.node_def.attr
    # The functions read variables, but write none.
    reads = [k for k, t in enumerate(inputs) if t.dtype == tf.resource]
    least = partitioner.order.record_use(node, inputs, True) if reads else 0
    return partitioner.add(
        node.type,
        inputs,
        {
            **attributes,
            **{key: traced[key] for key in same if key in traced},
            compat.READ_ONLY_INPUTS: reads,
            "output_shapes": [shape for _, shape in outputs],
        },
        outputs,
        least=least,
        functions=functions,
        source=node.operation,
    )
