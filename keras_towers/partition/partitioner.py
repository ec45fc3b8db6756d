"""Lays out the trace of the one-device step over towers, in one pass.

Forward and backward operations are treated the same. The rule of an operation
derives the layouts of its outputs from the layouts of its inputs. If an
operation has no rule, or no rule applies, its inputs are gathered or summed,
and it is computed once, as on one device. So a missing rule costs time, but
never changes a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_towers import compat
from keras_towers.partition.computed_once import compute_once
from keras_towers.partition.conversions import Converter, Options
from keras_towers.partition.division import divide
from keras_towers.partition.effects import ResourceOrder
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
    required,
    sizes_of,
)
from keras_towers.partition.program import Tensor, Update
from keras_towers.partition.registry import AXES, NOTES, RULES, SHAPES, Node
from keras_towers.partition.sizes import UNKNOWN


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateInfo:
    """How to treat an operation that stands for an update by an optimizer.

    Attributes:
        sparse: pairs of inputs that are the values and indices of a gradient.
        uses: the inputs of the graph that are variables of the update; None: it
            may use any variable.
    """

    sparse: Sequence[tuple[int, int]]
    uses: Sequence[Any] | None


class Partitioner(Converter):
    """Lays out graphs and builds the program.

    Args:
        unit: the unit of the batch: examples.
        is_first: a tensor: whether a tower is the first.
        options: the options of the layout.
        around: for the body of a function, the partitioner of its caller.

    Attributes:
        once: the traced operations that take rows, but are computed once.
        graphs: the graphs that were laid out.
        update_infos: the operations that stand for updates, by name.
        updates: the updates of the program.
        values: the values of the current graph, by the names of its tensors.
        order: the order of operations that use the same resources.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        options: Options,
        around: Partitioner | None = None,
    ):
        super().__init__(unit, is_first, options, can_exchange=around is None)
        self.once: list[Any] = []
        self.graphs: list[Any] = []
        if around is not None:
            self.sizes = around.sizes
            # The counts of units that a function finds are its own tensors.
            self.units = dict(around.units)
            self._unit_by_key = dict(around._unit_by_key)
            self._unit_numbers = around._unit_numbers
            self.graphs, self.once = around.graphs, around.once
        self.update_infos: Mapping[str, UpdateInfo] = {}
        self.updates: list[Update] = []
        self.values: dict[str, Value] = {}
        self.order = ResourceOrder()

    def for_function(self) -> Partitioner:
        """Return a partitioner for a function that towers call."""
        return Partitioner(self.unit, self.is_first, self.options, self)

    def lay_out_graph(self, graph: Any, inputs: Values) -> dict[str, Value]:
        """Lay out a graph; return the values of its tensors by their names.

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
            for operation in sort_topologically(graph.get_operations(), values):
                self._lay_out(operation, values)
        finally:
            self.values = before
        return values

    def _lay_out(self, operation: Any, values: dict[str, Value]) -> None:
        """Lay out an operation."""
        if operation.outputs and operation.outputs[0].name in values:
            return
        operands = [values[tensor.name] for tensor in operation.inputs]
        self.name = operation.name
        outputs = self.lay_out_node(Node(operation, self), operands)
        for tensor, value in zip(operation.outputs, outputs, strict=True):
            values[tensor.name] = value

    def lay_out_function(self, graph: Any, inputs: Values) -> Values:
        """Lay out a graph; return the values of its outputs."""
        values = self.lay_out_graph(graph, inputs)
        return [values[tensor.name] for tensor in graph.outputs]

    def lay_out_node(self, node: Node, inputs: list[Value]) -> Values:
        """Lay out an operation; return the values of its outputs."""
        if node.type == "Const":
            return [self._constant(node)]
        if node.operation.name in self.update_infos:
            self._update(node, inputs)
            return inputs
        known = folded(node, [value.known for value in inputs])
        outputs = self._known_values(node, known or ())
        if not outputs:
            try:
                outputs = self.apply_rules(node, inputs)
            except NotDivided:
                outputs = compute_once(node, inputs)
        for note in NOTES.get(node.type, ()):
            try:
                note(node, inputs, outputs)
            except NotDivided:
                continue
        self._complete(node, inputs, outputs, known)
        return outputs

    def _known_values(self, node: Node, known: Sequence[Any]) -> Values:
        """Return outputs whose entries are known; none: compute them.

        XLA needs constants for shapes and axes.
        """
        values: list[Value] = []
        for index, entries in enumerate(known):
            dtype, whole = node.output_dtype(index), None
            if dtype.is_integer or dtype.is_bool:
                whole = self.known_tensor(entries, dtype)
            if whole is None:
                return []
            values.append(Value(REPLICATED, whole=whole, known=entries))
        return values

    def _update(self, node: Node, inputs: list[Value]) -> None:
        """Add an update, and order later users of its variables after it."""
        info = self.update_infos[node.operation.name]
        # Of the values and indices of rows either both are divided, or none.
        sizes: dict[int, Any] = {}
        for pair in info.sparse:
            entries, indices = (inputs[k].sharded for k in pair)
            has_rows = entries is not None and entries == indices
            size = required(entries).size if has_rows else None
            sizes |= dict.fromkeys(pair, size)
        rows: dict[Tensor, Any] = {}
        tensors: list[Tensor] = []
        for k, value in enumerate(inputs):
            if sizes.get(k) is not None:
                tensor = required(value.local)
                rows[tensor] = sizes[k]
            elif value.is_partial and not value.gathers and k not in sizes:
                tensor = required(value.local)
            else:
                tensor = self.assemble(value)
            tensors.append(tensor)
        keys: list[Any] | None = None
        if info.uses is not None:
            keys = [self.values[t.name].whole for t in info.uses]
        level = self.order.record_update(keys, tensors)
        self.updates.append(Update(node.operation.name, tensors, level, rows))

    def _constant(self, node: Node) -> Value:
        (whole,) = self.copy(node.operation, (), is_repeated=True)
        shape, known = tuple(node.shapes[0]), constant(node.operation)
        return Value(REPLICATED, whole=whole, shape=shape, known=known)

    def apply_rules(self, node: Node, inputs: Values) -> Values:
        """Divide an operation by its rules or its axes.

        Raises:
            NotDivided: it has to be computed once.
        """
        if any(v.shape is None for v in inputs if v.sharded is not None):
            raise NotDivided
        # The type of a legacy call is the name of the function.
        is_call = compat.op_definition(node.type) is None
        for rule in RULES.get("PartitionedCall" if is_call else node.type, ()):
            try:
                return rule(node, *inputs)
            except NotDivided:
                continue
        if node.type not in AXES or all(v.is_replicated for v in inputs):
            raise NotDivided
        require(all(value.shape is not None for value in inputs))
        return divide(node, inputs, AXES[node.type](node, *inputs))

    def _complete(
        self,
        node: Node,
        inputs: Values,
        outputs: Values,
        known: Sequence[Any] | None,
    ) -> None:
        """Add the shapes of outputs, and their entries as far as known."""
        shapes = _symbolic_shapes(node, inputs)
        for index, value in enumerate(outputs):
            if isinstance(value.layout, ListOf):
                continue
            if known is not None and value.known is None:
                value.known = known[index]
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
    """Derive the global shapes of outputs with unknown sizes."""
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


def sort_topologically(
    operations: Sequence[Any], known: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield operations in topological order.

    In the bodies of some loops they are created in another order.
    """
    done: set[str] = set()
    for operation in operations:
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            if last.name in done:
                waiting.pop()
                continue
            pending = [
                tensor.op
                for tensor in last.inputs
                if tensor.op.name not in done and tensor.name not in known
            ]
            if pending:
                waiting += pending
                continue
            done.add(waiting.pop().name)
            yield last
