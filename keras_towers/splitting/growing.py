"""What the tensors of a graph are while it is being built.

Only what a tensor is computed from is looked at. Where that is not known, rows
of examples are assumed to stay where they are: whoever plans by it has to check
sizes when the step runs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.partition.sizes import EXAMPLES, examples_in, named
from keras_towers.splitting.interpreter import Interpreter, in_order
from keras_towers.splitting.values import (
    Kind,
    Value,
    examples,
    handle,
    other,
    same,
)

# The sizes of what they return follow from the data.
_SIZED_BY_DATA = {
    *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "ListDiff"),
    *("UniqueWithCountsV2", "DynamicPartition", "DynamicStitch"),
    *("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin"),
    *("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"),
    *("RaggedGather", "RaggedRange", "StringSplitV2", "StringSplit"),
    *("NonMaxSuppressionV3", "NonMaxSuppressionV4"),
    *("NonMaxSuppressionV5", "PyFunc", "EagerPyFunc"),
}
# They may move the first axis, or change its size.
_MOVING = {
    *("Reshape", "StridedSlice", "Slice", "Split", "SplitV", "ConcatV2"),
    *("Tile", "Pad", "PadV2", "MirrorPad", "Gather", "GatherV2"),
    *("GatherNd", "Transpose", "Pack", "Unpack"),
}
# The inputs of some of them that tell: the new shape, the axes' order, an axis.
_AXES = {
    **{"Reshape": 1, "Transpose": 1, "ConcatV2": -1, "GatherV2": 2},
    **{"Split": 0, "SplitV": 2},
}


def of_batch(tensor: tf.Tensor, index: int) -> Value:
    """Return the value of a tensor of a tower's part of the batch.

    Args:
        tensor: a tensor of shape [examples, ...], or a scalar.
        index: its place among them.
    """
    if tensor.shape.rank is None:
        return other("gets data of unknown rank", is_open=True)
    if tensor.shape.rank == 0:
        return same(shape=())
    if tensor.shape[0] is not None:
        return other("gets batches of a fixed size", is_open=True)
    sizes = named(f"size{index}", tensor.shape)
    return examples(shape=(EXAMPLES, *sizes[1:]))


class Growing:
    """Tells what tensors are, in the graphs of a step that is being traced.

    Attributes:
        assumes: whether it has assumed that rows stay where they are.
    """

    def __init__(self) -> None:
        self.assumes = False
        self._values: dict[Any, dict[str, Value]] = {}
        self._variables: dict[Any, Value] = {}
        self._interpreter = Interpreter(self._variables)

    def note_batch(self, data: Any) -> None:
        """Note a tower's part of the batch."""
        for index, leaf in enumerate(tf.nest.flatten(data)):
            if isinstance(leaf, tf.Tensor) and hasattr(leaf, "graph"):
                self._of(leaf.graph)[leaf.name] = of_batch(leaf, index)

    def note_common(self, values: Any) -> None:
        """Note tensors that are the same on all towers."""
        for leaf in tf.nest.flatten(values, expand_composites=True):
            if not isinstance(leaf, tf.Tensor) or not hasattr(leaf, "graph"):
                continue
            of_graph = self._of(leaf.graph)
            shape = None
            if leaf.shape.rank is not None:
                shape = tuple(named(f"common{len(of_graph)}", leaf.shape))
            of_graph[leaf.name] = same(shape=shape)

    def value_of(self, tensor: Any) -> Value:
        """Return what a tensor is, as far as its graph has been built."""
        if not hasattr(tensor, "graph"):
            return same(shape=tuple(tensor.shape))
        values = self._of(tensor.graph)
        if tensor.name not in values:
            for operation in in_order([tensor.op], values):
                found = self._outputs(operation, values)
                for output, value in zip(operation.outputs, found, strict=True):
                    if value.kind is Kind.OTHER and value.shape is None:
                        value = self._assumed(value, output)
                    values.setdefault(output.name, value)
        return values[tensor.name]

    def _of(self, graph: Any) -> dict[str, Value]:
        return self._values.setdefault(graph, {})

    def _outputs(self, operation: Any, values: dict[str, Value]) -> list[Value]:
        if operation.type == "Placeholder":
            return [self._captured(operation.outputs[0])]
        return self._interpreter.outputs_of(operation, values)

    def _captured(self, inside: Any) -> Value:
        """Return what a graph captured as an input."""
        for outside, placeholder in getattr(inside.graph, "captures", ()):
            if placeholder is not inside:
                continue
            if outside.dtype == tf.resource:
                # Before they are written, variables are alike.
                self._variables[id(outside)] = same()
                return handle(id(outside))
            return self.value_of(outside)
        return other("uses an unknown input", inside.op, is_open=True)

    def _assumed(self, value: Value, tensor: Any) -> Value:
        """Take rows of what is not known for those of the examples."""
        cause = None if value.reason is None else value.reason.operation
        moved = cause is not None and cause.type in _SIZED_BY_DATA | _MOVING
        if moved or not tensor.shape.rank or not self._keeps_first(tensor.op):
            return value
        self.assumes = True
        first, *others = tensor.shape
        sizes = (EXAMPLES if first is None else first, *others)
        return value.with_(shape=sizes, known=value.known)

    def _keeps_first(self, operation: Any) -> bool:
        """Whether the first axis of an input stays the first."""
        kind = operation.type
        if kind == "StridedSlice":
            masks = ("begin_mask", "end_mask")
            dropped = operation.get_attr("shrink_axis_mask")
            opened = all(operation.get_attr(mask) & 1 for mask in masks)
            return opened and not dropped & 1
        if kind not in _MOVING:
            return kind not in _SIZED_BY_DATA
        if kind not in _AXES:
            return False
        known = self.value_of(operation.inputs[_AXES[kind]]).known
        if known is None or not known.size:
            return False
        first = known.flat[0]
        if kind == "Reshape":
            return examples_in(first) == 1
        return (first == 0) == (kind == "Transpose")
