"""Results of a branch that the other branches leave out.

The gradient of a conditional takes what its branches keep for it. For what only
another branch keeps, a branch returns a placeholder, without rows where their
number is not known before the step. XLA makes all branches' results equally
large in a function. But one that gets a placeholder from outside compiles the
gradients of all branches for its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_towers import compat
from keras_towers.partition.kernels import called_names, functions_of
from keras_towers.partition.program import Tensor

_PLACEHOLDER = "FakeParam"


def is_left_out(tensor: Tensor, graphs: Sequence[Any]) -> bool:
    """Whether a tensor is a placeholder, or may be one of a branch.

    Args:
        tensor: the tensor.
        graphs: the graphs whose functions operations call by their names.
    """
    operation = tensor.operation
    if operation is None:
        return False
    if operation.type == _PLACEHOLDER:
        return _is_empty(operation.attributes)
    if not operation.type.endswith(("If", "Case")):
        return False
    results = [f.outputs[tensor.index] for f in functions_of(operation)]
    return any(is_left_out(result, graphs) for result in results) or any(
        _is_left_out_by(name, tensor.index, graphs)
        for name in called_names(operation.attributes)
    )


def _is_left_out_by(name: str, index: int, graphs: Sequence[Any]) -> bool:
    """Whether a branch, or one in it, leaves out a result.

    Args:
        name: the name of the branch's function.
        index: the number of the result.
        graphs: the graphs whose functions operations call by their names.
    """
    definition = compat.definition_of_function(graphs, name)
    if definition is None:
        return False
    nodes = {node.name: node for node in definition.node_def}
    result = definition.signature.output_arg[index].name
    # That of an operation, or the name of an input.
    source, _, output = definition.ret[result].partition(":")
    node = nodes.get(source)
    if node is None:
        return False
    if node.op == _PLACEHOLDER:
        return _is_empty(node.attr)
    return node.op.endswith(("If", "Case")) and any(
        _is_left_out_by(inside, int(output.rpartition(":")[2]), graphs)
        for inside in called_names(node.attr)
    )


def _is_empty(attributes: Any) -> bool:
    """Whether a placeholder has no entries, or nobody knows how many."""
    shape = attributes["shape"].shape
    return shape.unknown_rank or any(dim.size < 1 for dim in shape.dim)
