"""Sparse rows of examples, as a batch has them.

Each example may have another number of entries, which nothing here follows.
What is known is what comes of all three parts of such a tensor together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_towers.partition.sizes import EXAMPLES, UNKNOWN
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Value,
    examples,
    of_known,
    other,
    total,
)

if TYPE_CHECKING:
    from keras_towers.splitting.interpreter import Interpreter

_PARTS = 3


def of_sparse(operations: Sequence[Any], sizes: Sequence[Any]) -> list[Value]:
    """Return the values of indices, entries and shape of sparse rows.

    Args:
        operations: the inputs of the graph that they are.
        sizes: the static shape, of which the first axis is that of examples.
    """
    text = "gets a SparseTensor, which is not followed"
    indices, entries, shape = operations
    known = [UNKNOWN if size is None else size for size in sizes[1:]]
    return [
        other(text, indices, is_open=True, key=_PARTS),
        other(text, entries, is_open=True),
        of_known([EXAMPLES, *known]),
    ]


def _are_rows(node: Node, indices: Value, places: Sequence[int]) -> bool:
    """Whether inputs are the parts of one tensor of the batch, as they are."""
    tensors = [_source(node.operation.inputs[place]) for place in places]
    inputs = list(node.operation.graph.inputs)
    reason = indices.reason
    if indices.key != _PARTS or reason is None:
        return False
    if reason.operation is not tensors[0].op:
        return False
    at = [t is tensors[0] for t in inputs].index(True)
    given = inputs[at : at + _PARTS]
    return all(a is b for a, b in zip(given, tensors, strict=True))


def _source(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _product(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Value | Sequence[Value]:
    indices, _, shape, factor = given
    if not _are_rows(node, indices, (0, 1, 2)):
        return _of_anything(interpreter, node, given)
    if factor.kind is Kind.OTHER:
        return factor.with_(key=None)
    over_examples = node.attr("adjoint_a")
    static = node.static_shape()
    columns = None if static is None else static[-1]
    if not over_examples and factor.is_same:
        return examples(shape=(EXAMPLES, columns))
    rows = factor.rows
    if (
        over_examples
        and rows is not None
        and (rows.axis, rows.count, rows.draw) == (0, 1, None)
        and not node.attr("adjoint_b")
    ):
        size = None if shape.known is None else shape.known[1]
        size = size if isinstance(size, int) else None
        return total(factor.degree, shape=(size, columns))
    raise DoesNotSplit("multiplies sparse rows by what is no matrix of weights")


def _dense(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Value | Sequence[Value]:
    indices, shape, _, default = given
    if not default.is_same or not _are_rows(node, indices, (0, 2, 1)):
        return _of_anything(interpreter, node, given)
    return examples(shape=tuple(shape.known))


def _of_anything(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Value | Sequence[Value]:
    unknown = [value for value in given if value.kind is Kind.OTHER]
    if unknown:
        return unknown[0].with_(key=None)
    return interpreter.unknown_outputs(node, given)


SPECIAL: dict[str, Any] = {
    "SparseTensorDenseMatMul": _product,
    "SparseToDense": _dense,
}
