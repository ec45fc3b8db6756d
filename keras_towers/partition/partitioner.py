"""Lays out the trace of the one-device step over towers, in one pass.

Forward and backward operations are treated the same. The rule of an operation
derives the layouts of its outputs from the layouts of its inputs. If an
operation has no rule, or no rule applies, its inputs are gathered or summed,
and it is computed once, as on one device. So a missing rule costs time, but
never changes a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_towers import compat
from keras_towers.partition.builder import Output
from keras_towers.partition.conversions import Converter, LayoutOptions
from keras_towers.partition.division import divide
from keras_towers.partition.folding import constant, folded
from keras_towers.partition.layouts import (
    REPLICATED,
    InputLayout,
    InShards,
    ListOf,
    Mirrored,
    NotDivided,
    Shape,
    Sharded,
    Unit,
    Value,
    Values,
    replicated,
    require,
    sizes_of,
    unless_none,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import AXES, NOTES, RULES, SHAPES, Node
from keras_towers.partition.resources import Resources, type_of_content
from keras_towers.partition.sizes import UNKNOWN
from keras_towers.partition.undivided import LOOPS, compute_once

_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


class Partitioner(Converter):
    """Lays out graphs and builds the program.

    Args:
        unit: the unit of the batch: examples.
        is_first: a tensor: whether a tower is the first.
        is_first_part: a tensor: whether a micro-batch is its tower's first.
        options: the options of the layout.
        around: for the body of a function, the partitioner of its caller.

    Attributes:
        computed_once: traced operations that take rows, but are not divided.
        graphs: the graphs that were laid out.
        gradient_layouts: for the operations that return gradients to an
            optimizer, by name, how to lay these out.
        gradients: the gradients, by the names of the operations that add up
            their terms.
        updates: the operations of optimizers' updates, by name: where they run
            if they are computed once; "": on the first tower.
        values: the values of the current graph, by the names of its tensors.
        resources: the order of operations that use the same resources, and
            what variables hold.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        is_first_part: Tensor,
        options: LayoutOptions,
        around: Partitioner | None = None,
    ):
        super().__init__(unit, is_first, is_first_part, options, around)
        self.computed_once: list[Any] = (
            [] if around is None else around.computed_once
        )
        self.graphs: list[Any] = [] if around is None else around.graphs
        self.values: dict[str, Value] = {}
        self.gradient_layouts: Mapping[str, Sequence[InputLayout]] = {}
        self.gradients: Mapping[str, str] = {}
        self.updates: Mapping[str, str] = {}
        # The level after that in which gradients were added up.
        self._updates_from = 0
        self.resources: Resources = Resources(
            None if around is None else around.resources
        )
        self._around = around
        # Whether functions get the whole of variables in shards.
        self._gathers_for_functions: bool = (
            around is not None and around._gathers_for_functions
        )

    def for_function(self, **options: Any) -> Partitioner:
        """Return a partitioner for a function that towers call.

        Args:
            **options: the options that differ.
        """
        return Partitioner(
            self.unit,
            self.is_first,
            self.is_first_part,
            dataclasses.replace(self.options, **options),
            self,
        )

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
                outputs = operation.outputs
                if outputs and outputs[0].name in values:
                    continue
                self.name = operation.name
                operands = [values[tensor.name] for tensor in operation.inputs]
                results = self.lay_out_node(Node(operation, self), operands)
                names = [tensor.name for tensor in outputs]
                values.update(zip(names, results, strict=True))
        finally:
            self.values = before
        return values

    def lay_out_function(self, graph: Any, inputs: Values) -> Values:
        """Lay out a graph; return the values of its outputs."""
        values = self.lay_out_graph(graph, inputs)
        return [values[tensor.name] for tensor in graph.outputs]

    def lay_out_node(self, node: Node, inputs: list[Value]) -> Values:
        """Lay out an operation; return the values of its outputs."""
        if node.type == "Const":
            return [self._constant(node)]
        tensors = [
            t for v in inputs for t in (v.local, v.whole) if t is not None
        ]
        self.near = max((tensor.level for tensor in tensors), default=0)
        self.gradient = self.gradients.get(node.operation.name, "")
        device = self.updates.get(node.operation.name)
        self.device = device or ""
        self.resources.reads_from = 0 if device is None else self._updates_from
        if node.operation.name in self.gradient_layouts:
            return self._gradients(node, inputs)
        known = folded(node, [value.known for value in inputs])
        try:
            outputs = self._divided(node, inputs)
        except NotDivided:
            outputs = self._known_values(node, known or ())
            outputs = outputs or compute_once(node, inputs)
        for output in outputs:
            if output.is_partial:
                output.local = self.once_per_tower(unless_none(output.local))
        for note in NOTES.get(node.type, ()):
            try:
                note(node, inputs, outputs)
            except NotDivided:
                continue
        self._complete(node, inputs, outputs, known)
        return outputs

    def _divided(self, node: Node, inputs: Values) -> Values:
        """Divide an operation, if needed after variables are gathered.

        Raises:
            NotDivided: it has to be computed once.
        """
        if node.type in LOOPS:
            return self.apply_to_wholes(node, inputs)
        try:
            return self.apply_rules(node, inputs)
        except NotDivided:
            calls = node.type in _BRANCHES or node.must_be_compiled
            if not calls and not _has_rows_and_shards(inputs):
                raise
        return self.apply_to_wholes(node, inputs)

    def apply_to_wholes(self, node: Node, inputs: Values) -> Values:
        """Divide an operation after variables in shards are gathered.

        Functions cannot gather them, and a rule may not know what to do with
        them. What is computed from the examples would be larger.

        Raises:
            NotDivided: it has to be computed once.
        """
        wholes = list(map(self.gathered, inputs))
        before = self._gathers_for_functions
        self._gathers_for_functions = True
        try:
            return self.apply_rules(node, wholes)
        finally:
            self._gathers_for_functions = before

    def gathered(self, value: Value) -> Value:
        """Return a value, and of rows of a variable the whole."""
        rows = value.sharded
        if rows is None or not rows.of_variables:
            return value
        return Value(REPLICATED, self.replicate(value), shape=value.shape)

    def _known_values(self, node: Node, known: Sequence[Any]) -> Values:
        """Return outputs whose entries are known; none: compute them.

        XLA needs constants for shapes and axes.
        """
        dtypes = [tensor.dtype for tensor in node.operation.outputs]
        with contextlib.suppress(NotDivided):
            require(all(dtype.is_integer or dtype.is_bool for dtype in dtypes))
            wholes = map(self.known_tensor, known, dtypes)
            return [
                Value(REPLICATED, whole=unless_none(whole), known=entries)
                for entries, whole in zip(known, wholes, strict=True)
            ]
        return []

    def _gradients(self, node: Node, inputs: Values) -> Values:
        """Lay gradients out as an optimizer gets them.

        Those that it gets whole are added up in one round.
        """
        layouts = self.gradient_layouts[node.operation.name]
        parts = [value.local for value in inputs if value.is_partial]
        least = max((unless_none(part).level for part in parts), default=0)
        outputs: list[Value] = []
        for index, value in enumerate(inputs):
            self.gradient = f"{node.operation.name}:{index}"
            layout = layouts[index]
            if isinstance(layout, InShards):
                rows = self.rows_in(layout)
                tensor = self.shard(value, rows)
                outputs.append(Value(rows, tensor, shape=value.shape))
                continue
            on_towers = isinstance(layout, Mirrored)
            tensor = self._whole_gradient(value, on_towers, least)
            facts = Value(REPLICATED, shape=value.shape)
            outputs.append(replicated(tensor, facts))
        # Where weights are written, nothing else should have their memory.
        self.resources.read_again()
        self._updates_from = least + 1
        if self.options.over_columns:
            ends = [unless_none(v.local or v.whole) for v in outputs]
            copies = node.copy(ends, [end.shape for end in ends])
            for value, copy in zip(outputs, copies, strict=True):
                if value.local is None:
                    value.whole = copy
                else:
                    value.local = copy
        return outputs

    def _whole_gradient(
        self, value: Value, on_towers: bool, least: int
    ) -> Tensor:
        """Return a whole gradient, once or on each tower.

        Args:
            value: the gradient.
            on_towers: whether each tower gets it.
            least: the earliest level at whose end it is added up.
        """
        if value.is_partial and not value.gathers:
            total = self.exchange(
                "sum",
                unless_none(value.local),
                sizes=value.shape,
                on_towers=on_towers,
                least=least,
            )
            if not on_towers:
                value.whole = total
            return total
        rows = value.sharded
        if on_towers and rows is not None and not rows.of_variables:
            return self._gather(
                rows, unless_none(value.local), value.shape, True
            )
        return self.replicate(value) if on_towers else self.assemble(value)

    def content_of(self, variable: Value) -> Value:
        """Return what a variable holds at this point of the trace.

        A function gets it from its caller, unless it has written it.

        Raises:
            NotDivided: the variable is not an input of the step.
        """
        handle = self.replicate(variable)
        require(handle.handle is not None)
        common = self.resources.common_handle(handle)
        contents = self.resources.contents
        if common in contents:
            return contents[common]
        if self._around is not None:
            around = self._around
            content = around.content_of(Value(REPLICATED, whole=handle))
            if self._gathers_for_functions:
                content = around.gathered(content)
            return around.captured(content)
        local = self.resources.copies.get(common)
        rows = self.resources.rows.get(common)
        _, shape = type_of_content(common)
        sizes = None if shape.rank is None else sizes_of(shape)
        if rows is not None:
            content = Value(rows, self.read(unless_none(local)), shape=sizes)
        else:
            content = Value(
                REPLICATED,
                local=None if local is None else self.read(local),
                whole=self.read(common),
                shape=sizes,
            )
        contents[common] = content
        return content

    def read(self, handle: Tensor) -> Tensor:
        """Read a variable, or the towers' copies of it, or their shards."""
        dtype, shape = type_of_content(handle)
        (value,) = self.add_in_order(
            "ReadVariableOp", [handle], {"dtype": dtype}, [(dtype, shape)]
        )
        return value

    def add_in_order(
        self,
        type_: str,
        operands: Sequence[Tensor],
        attributes: Mapping[str, Any],
        outputs: Sequence[Output] = (),
        reads: bool = True,
    ) -> list[Tensor]:
        """Add an operation after earlier users of the same variables.

        Args:
            type_: its type.
            operands: its inputs.
            attributes: its attributes.
            outputs: the dtypes and shapes of its outputs.
            reads: whether it only reads variables.
        """
        least = self.resources.record_use(type_, operands, reads)
        return self.add(
            type_, operands, attributes, outputs, least, has_effect=not reads
        )

    def assign(self, variable: Value, content: Value) -> None:
        """Assign a value to a variable, and to all of its copies.

        A function leaves it to its caller.

        Raises:
            NotDivided: the variable is not an input of the step.
        """
        handle = self.replicate(variable)
        require(handle.handle is not None)
        common = self.resources.common_handle(handle)
        if self._around is not None:
            self.resources.contents[common] = content
            return
        rows = self.resources.rows.get(common)
        if rows is not None:
            handle = self.resources.copies[common]
            value = self.shard(content, rows)
            content = Value(rows, value, shape=content.shape)
        elif handle.on_towers:
            value = self.replicate(content)
        else:
            value = self.assemble(content)
        self.add_in_order(
            "AssignVariableOp",
            [handle, value],
            {"dtype": value.dtype, "validate_shape": False},
            reads=False,
        )
        self.resources.contents[common] = content

    def rows_of(self, variable: Value) -> Sharded | None:
        """Return the layout of a variable in shards; None: it is not."""
        whole = variable.whole
        return None if whole is None else self.resources.rows.get(whole)

    def captured(self, value: Value) -> Value:
        """Return a value as a function sees it that captures it."""
        if not value.is_replicated:
            return dataclasses.replace(value, whole_from=None)
        return dataclasses.replace(
            value,
            layout=REPLICATED,
            local=None,
            whole=self.replicate(value),
            whole_from=None,
        )

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


def _has_rows_and_shards(inputs: Values) -> bool:
    """Whether some inputs are rows of examples, and others of variables."""
    layouts = [value.sharded for value in inputs if value.sharded is not None]
    return len({layout.of_variables for layout in layouts}) == 2


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
