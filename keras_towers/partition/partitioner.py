"""Lays out the trace of one device's step over towers, in one pass.

Every operation keeps its meaning, forward and backward alike. Its rule says how
its outputs are laid out if its inputs are so. Where it has none, or the rule
does not fit, its inputs are gathered or summed, and it is computed once, as on
one device. A rule that is missing costs time; it does not change a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from keras_towers import compat
from keras_towers.partition.conversions import Converter, Options
from keras_towers.partition.division import divided
from keras_towers.partition.effects import ResourceOrder, computed_once
from keras_towers.partition.folding import constant, folded
from keras_towers.partition.layouts import (
    REPLICATED,
    ListOf,
    NotDivided,
    Shape,
    Unit,
    Value,
    Values,
    require,
    sizes_of,
)
from keras_towers.partition.program import Tensor, Update
from keras_towers.partition.registry import AXES, NOTES, RULES, SHAPES, Node
from keras_towers.partition.sizes import UNKNOWN


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateInfo:
    """What an operation that stands for an optimizer's update means.

    Attributes:
        sparse: which of its inputs are values and indices of one gradient.
        uses: the inputs of the graph that are variables of the update; None:
            it may use any.
    """

    sparse: Sequence[tuple[int, int]]
    uses: Sequence[Any] | None


class Partitioner(Converter):
    """Lays out graphs, and collects the operations of a program.

    Args:
        unit: what the rows of a batch are divided by: examples.
        is_first: whether a tower is the first.
        options: how the graph is laid out.
        around: of a function that towers call: what lays out its call.

    Attributes:
        once: the operations that take rows, but are computed once.
        graphs: the graphs that were laid out.
        update_infos: the operations that stand for updates, by name.
        updates: the updates of the program.
        values: the values of the graph that is being laid out, by the names of
            their tensors.
        order: the order of operations that use the same resources.
        variances: variances that were computed together with their means, by
            the names of their operations.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        options: Options,
        around: Partitioner | None = None,
    ):
        super().__init__(unit, is_first, options, meets=around is None)
        self.once: list[Any] = []
        self.graphs: list[Any] = []
        if around is not None:
            self.sizes, self.units = around.sizes, around.units
            self.graphs, self.once = around.graphs, around.once
        self.update_infos: Mapping[str, UpdateInfo] = {}
        self.updates: list[Update] = []
        self.values: dict[str, Value] = {}
        self.variances: dict[str, Value] = {}
        self.order = ResourceOrder()

    def for_function(self) -> Partitioner:
        """Return a partitioner for a function that towers call."""
        return Partitioner(self.unit, self.is_first, self.options, self)

    def run(self, graph: Any, inputs: Values) -> dict[str, Value]:
        """Lay out a graph; return the values of its tensors, by their names.

        Args:
            graph: the graph of the step, or of a function.
            inputs: the values of its N inputs.
        """
        # The body of a loop is laid out several times.
        if graph not in self.graphs:
            self.graphs.append(graph)
        values: dict[str, Value] = {}
        for tensor, value in zip(graph.inputs, inputs, strict=True):
            if value.shape is None and tensor.shape.rank is not None:
                value.shape = sizes_of(tensor.shape)
            values[tensor.name] = value
        before, self.values = self.values, values
        try:
            for operation in topologically_sorted(
                graph.get_operations(), values
            ):
                self._lay_out(operation, values)
        finally:
            self.values = before
        return values

    def _lay_out(self, operation: Any, values: dict[str, Value]) -> None:
        """Add an operation, and the values of its outputs."""
        if operation.outputs and operation.outputs[0].name in values:
            return
        operands = [values[tensor.name] for tensor in operation.inputs]
        self.name = operation.name
        outputs = self._outputs(Node(operation, self), operands)
        for tensor, value in zip(operation.outputs, outputs, strict=True):
            values[tensor.name] = value

    def call(self, graph: Any, inputs: Values) -> Values:
        """Lay out a graph; return the values of its outputs."""
        values = self.run(graph, inputs)
        return [values[tensor.name] for tensor in graph.outputs]

    def _outputs(self, node: Node, inputs: list[Value]) -> Values:
        if node.type == "Const":
            return [self._constant(node)]
        if node.operation.name in self.update_infos:
            self._update(node, inputs)
            return inputs
        try:
            outputs = self.by_rule(node, inputs)
        except NotDivided:
            outputs = computed_once(node, inputs)
        for note in NOTES.get(node.type, ()):
            try:
                note(node, inputs, outputs)
            except NotDivided:
                continue
        self._complete(node, inputs, outputs)
        return outputs

    def _update(self, node: Node, inputs: list[Value]) -> None:
        """Update weights; what comes behind uses them afterwards."""
        info = self.update_infos[node.operation.name]
        local_parts = [
            self.partial(value)
            if value.is_partial and not value.gathers
            else None
            for value in inputs
        ]
        rows: list[Tensor] = []
        for pair in info.sparse:
            entries, places = (inputs[k] for k in pair)
            if entries.sharded and entries.layout == places.layout:
                for k in pair:
                    local_parts[k] = inputs[k].local
                    rows.append(cast("Tensor", local_parts[k]))
            else:
                for k in pair:
                    local_parts[k] = self.whole(inputs[k])
        tensors = [
            self.whole(value) if part is None else part
            for value, part in zip(inputs, local_parts, strict=True)
        ]
        keys: list[Any] | None = None
        if info.uses is not None:
            keys = [self.values[t.name].whole for t in info.uses]
        level = self.order.update(keys, tensors)
        self.updates.append(Update(node.operation.name, tensors, level, rows))

    def _constant(self, node: Node) -> Value:
        (whole,) = self.copy(node.operation, (), is_repeated=True)
        shape, known = tuple(node.shapes[0]), constant(node.operation)
        return Value(REPLICATED, whole=whole, shape=shape, known=known)

    def by_rule(self, node: Node, inputs: Values) -> Values:
        """Divide an operation.

        Raises:
            NotDivided: if it has to be computed once.
        """
        if any(v.shape is None for v in inputs if v.sharded is not None):
            raise NotDivided
        # A function is called by an operation that is named after it.
        is_call = compat.op_definition(node.type) is None
        for rule in RULES.get("PartitionedCall" if is_call else node.type, ()):
            try:
                return rule(node, *inputs)
            except NotDivided:
                continue
        if node.type not in AXES or all(v.is_replicated for v in inputs):
            raise NotDivided
        require(all(value.shape is not None for value in inputs))
        return divided(node, inputs, AXES[node.type](node, *inputs))

    def _complete(self, node: Node, inputs: Values, outputs: Values) -> None:
        """Add what the trace knows of shapes, and entries that are known."""
        entries = folded(node, [value.known for value in inputs])
        shapes = _symbolic_shapes(node, inputs)
        for index, value in enumerate(outputs):
            if isinstance(value.layout, ListOf):
                continue
            if entries is not None and value.known is None:
                value.known = entries[index]
            if node.shapes[index].rank is None:
                continue
            sizes = list(sizes_of(node.shapes[index]))
            for shape in (value.shape, shapes[index]):
                if shape is not None and len(shape) == len(sizes):
                    sizes = [
                        known if size is UNKNOWN else size
                        for size, known in zip(sizes, shape, strict=True)
                    ]
            if value.sharded is not None:
                sizes[value.sharded.axis] = value.sharded.size
            value.shape = tuple(sizes)


def _symbolic_shapes(node: Node, inputs: Values) -> Sequence[Shape | None]:
    """The shapes of outputs, where the trace does not know them."""
    unknown = [None] * node.num_outputs
    if all(shape.is_fully_defined() for shape in node.shapes):
        return unknown
    try:
        if node.type in SHAPES:
            return [SHAPES[node.type](node, *inputs)] * node.num_outputs
        if node.type in AXES and all(v.shape is not None for v in inputs):
            return AXES[node.type](node, *inputs).shapes(inputs)
    except NotDivided:
        return unknown
    return unknown


def topologically_sorted(
    operations: Sequence[Any], known: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield operations, each after those whose outputs it takes.

    The bodies of loops are not always built in this order.
    """
    done: set[str] = set()
    for operation in operations:
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            if last.name in done:
                waiting.pop()
                continue
            ahead = [
                tensor.op
                for tensor in last.inputs
                if tensor.op.name not in done and tensor.name not in known
            ]
            if ahead:
                waiting += ahead
                continue
            done.add(waiting.pop().name)
            yield last
