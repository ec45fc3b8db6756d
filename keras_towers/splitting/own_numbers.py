"""Picks from each example by its own number.

``tf.gather_nd(x, tf.stack([tf.range(n), index], 1))`` numbers the examples, and
picks from each of them: towers that number theirs do the same. So does what
takes ``tf.range(n)`` as the number of the image that a box belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.sizes import EXAMPLES, examples_in
from keras_towers.splitting.values import Kind, Rows, Value, examples

# The inputs that have the numbers of examples, and that are picked from or put
# back, for each type of operation.
_PLACES = {
    "GatherNd": (1, 0),
    "ScatterNd": (0, 1),
    "CropAndResize": (2, 0),
    "CropAndResizeGradImage": (2, 0),
    "CropAndResizeGradBoxes": (3, 0),
}
# Their last input is the shape of what they return.
_OF_SHAPES = ("ScatterNd", "CropAndResizeGradImage")
_OF_COLUMNS = ("GatherNd", "ScatterNd")


def picked(
    node: Node, given: list[Value], values: Mapping[str, Value]
) -> Value | None:
    """Return what such a pick is, or its gradient; None: it is none.

    Args:
        node: an operation.
        given: its inputs.
        values: what the tensors of its graph are.
    """
    if node.type not in _PLACES:
        return None
    unsorted = _unsorted(node, given, values)
    if unsorted is not None:
        return unsorted
    number, linear = _PLACES[node.type]
    tensor = node.operation.inputs[number]
    columns = [tensor]
    if node.type in _OF_COLUMNS:
        columns = _columns(tensor, values)
    if not columns or not _is_number(columns[0], values):
        return None
    more = [values[column.name] for column in columns[1:]]
    fixed = [v for i, v in enumerate(given) if i not in (number, linear)]
    source = given[linear]
    if source.rows != Rows(0) or source.kind is not Kind.ROWS:
        return None
    if node.type in _OF_SHAPES:
        shape = fixed.pop().known
        if shape is None or shape.flat[0] != EXAMPLES:
            return None
        sizes = tuple(shape.flat)
    elif node.type == "GatherNd":
        if source.shape is None or len(source.shape) < len(columns):
            return None
        sizes = (EXAMPLES, *source.shape[len(columns) :])
    else:
        sizes = (EXAMPLES, *(node.static_shape() or (None,) * 4)[1:])
    if not all(map(_is_of_example, (*more, *fixed))):
        return None
    return examples(0, degree=source.degree, shape=sizes)


def _unsorted(
    node: Node, given: list[Value], values: Mapping[str, Value]
) -> Value | None:
    """Return the gradient of the largest entries of each row; None: it is none.

    It puts rows back into a flat tensor, at the index plus the number of the
    row times its number of entries.
    """
    if node.type != "ScatterNd":
        return None
    _, grad, count = given
    size = None if count.known is None else count.known.flat[0]
    entries = examples_in(size)
    added = _flat(node.operation.inputs[0]).op
    if added.type != "AddV2" or not entries or grad.rows is None:
        return None
    rows = grad.rows
    if rows.draw is not None or (rows.axis, rows.outer) != (0, 1):
        return None
    for index, number in (added.inputs, list(added.inputs)[::-1]):
        index, ends = _flat(index), _flat(number).op
        if index.op.type != "TopKV2" or index is not index.op.outputs[1]:
            continue
        sorted_ = values[index.op.inputs[0].name]
        if sorted_.rows is None or sorted_.rows.place[:2] != (0, 1):
            continue
        each = None if sorted_.shape is None else sorted_.shape[-1]
        known = [_known(end, values) for end in ends.inputs]
        if ends.type == "Range" and known == [[0], [size], [each]]:
            return examples(0, 1, entries, grad.degree, shape=(size,))
    return None


def _flat(tensor: Any) -> Any:
    while tensor.op.type in ("Identity", "Cast", "Reshape", "ExpandDims"):
        tensor = tensor.op.inputs[0]
    return tensor


def _is_of_example(value: Value) -> bool:
    """Whether it is the same everywhere, or has a row for each example."""
    rows = value.rows
    if rows is not None:
        one = rows.draw is None and rows.place == (0, 1, 1)
        return one and value.kind is Kind.ROWS and value.is_free
    return value.is_same and not value.grows


def _columns(tensor: Any, values: Mapping[str, Value]) -> list[Any]:
    """Return the columns that indices consist of, one for each axis."""
    operation = _behind(tensor).op
    inputs = list(operation.inputs)
    if operation.type == "Pack":
        last = operation.get_attr("axis") in (1, -1)
        ranks = {given.shape.rank for given in inputs}
        return inputs if last and ranks == {1} else []
    if operation.type != "ConcatV2":
        return []
    *parts, axis = inputs
    if _known(axis, values) not in ([1], [-1]):
        return []
    if any(part.shape.rank != 2 or part.shape[1] is None for part in parts):
        return []
    # Of a part with several columns each is that of another axis.
    return [part for part in parts for _ in range(part.shape[1])]


def _is_number(tensor: Any, values: Mapping[str, Value]) -> bool:
    """Whether a tensor has the number of each example."""
    operation = _behind(tensor).op
    while operation.type in ("Reshape", "ExpandDims", "StridedSlice"):
        if operation.type == "StridedSlice" and not _only_adds(
            operation, values
        ):
            return False
        operation = _behind(operation.inputs[0]).op
    if operation.type != "Range":
        return False
    ends = [_known(end, values) for end in operation.inputs]
    return ends == [[0], [EXAMPLES], [1]]


def _only_adds(operation: Any, values: Mapping[str, Value]) -> bool:
    """Whether a slice of a vector is all of it, with a new axis."""
    new = operation.get_attr("new_axis_mask")
    masks = [operation.get_attr(f"{name}_mask") for name in ("begin", "end")]
    others = ("shrink_axis_mask", "ellipsis_mask")
    return (
        new in (1, 2)
        and all(mask | new == 3 for mask in masks)
        and not any(operation.get_attr(name) for name in others)
        and _known(operation.inputs[3], values) == [1, 1]
    )


def _behind(tensor: Any) -> Any:
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor


def _known(tensor: Any, values: Mapping[str, Value]) -> list[Any]:
    value = values.get(tensor.name)
    known = None if value is None else value.known
    return [] if known is None else list(known.flat)
