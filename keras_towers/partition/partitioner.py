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

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.builder import Builder, NeedsExchange, attribute
from keras_towers.partition.conversions import (
    SIZE,
    Converter,
    is_small,
    local_shape,
)
from keras_towers.partition.effects import (
    Effect,
    effect_of,
    variable_spec,
    written,
)
from keras_towers.partition.factors import Factors, Labels
from keras_towers.partition.folding import constant, folded
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Layout,
    ListOf,
    Sharded,
    Unit,
    Value,
)
from keras_towers.partition.node import Node
from keras_towers.partition.program import Tensor, Update
from keras_towers.partition.registry import (
    ALWAYS,
    AXES,
    BY_PLACES,
    NUMBERS,
    OF_LISTS,
    RULES,
    SHAPES,
)
from keras_towers.partition.resource_order import ResourceOrder
from keras_towers.partition.sizes import Size


@dataclasses.dataclass(frozen=True, eq=False)
class Updating:
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
        sizes: symbols of sizes, and what they are: numbers that all have.
        builder: takes the operations.
        lists: whether lists may be divided.
        ranks: whether several processes run the program.
        xla: whether XLA compiles what towers compute.

    Attributes:
        once: the operations that take rows, but are computed once.
        graphs: the graphs that were laid out.
        updating: the operations that stand for updates, by name.
        updates: the updates of the program.
        values: what is known of the graph that is laid out, by tensors' names.
        order: that of the operations that use the same resources.
        variances: what was found with the means that they follow from, by the
            names of their operations.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        sizes: Mapping[str, Tensor],
        builder: Builder,
        lists: bool = True,
        ranks: bool = False,
        xla: bool = False,
    ):
        super().__init__(unit, is_first, sizes, builder)
        self.lists = lists
        self.ranks = ranks
        self.xla = xla
        self.once: list[Any] = []
        self.graphs: list[Any] = []
        self.updating: Mapping[str, Updating] = {}
        self.updates: list[Update] = []
        self.values: dict[str, Value] = {}
        self.variances: dict[str, Value] = {}
        self.order = ResourceOrder()

    def inside(self, builder: Builder) -> Partitioner:
        """Return one for a function that towers call."""
        result = Partitioner(
            self.unit,
            self.is_first,
            self.sizes,
            builder,
            self.lists,
            xla=self.xla,
        )
        result.graphs, result.once = self.graphs, self.once
        result._found, result._units = self._found, self._units
        return result

    # ---- the pass ------------------------------------------------------------

    def run(self, graph: Any, given: Sequence[Value]) -> dict[str, Value]:
        """Lay out a graph; return the values of its tensors, by their names.

        Args:
            graph: it.
            given: the values of its N inputs.
        """
        self.note_graph(graph)
        values = {
            tensor.name: value
            for tensor, value in zip(graph.inputs, given, strict=True)
        }
        before, self.values = self.values, values
        for operation in topologically_sorted(graph.get_operations(), values):
            if operation.outputs and operation.outputs[0].name in values:
                continue
            inputs = [values[tensor.name] for tensor in operation.inputs]
            ranks = [None if v.shape is None else len(v.shape) for v in inputs]
            node = Node(operation, ranks)
            self.builder.name = operation.name
            outputs = self._outputs(node, inputs)
            for tensor, value in zip(operation.outputs, outputs, strict=True):
                values[tensor.name] = value
        self.values = before
        return values

    def note_graph(self, graph: Any) -> None:
        """Note a graph, whose functions are called as they are."""
        # The body of a loop is laid out several times.
        if graph not in self.graphs:
            self.graphs.append(graph)

    def call(self, graph: Any, given: Sequence[Value]) -> list[Value]:
        """Lay out a graph; return the values of its outputs."""
        values = self.run(graph, given)
        return [values[tensor.name] for tensor in graph.outputs]

    def _outputs(self, node: Node, inputs: list[Value]) -> list[Value]:
        if node.type == "Const":
            return [self._constant(node)]
        if node.operation.name in self.updating:
            self._update(node, inputs)
            return inputs
        outputs = self.by_rule(node, inputs)
        if outputs is None:
            outputs = self.computed_once(node, inputs)
        self._complete(node, inputs, outputs)
        for note in NUMBERS.get(node.type, ()):
            note(self, node, inputs, outputs)
        return outputs

    def _update(self, node: Node, inputs: list[Value]) -> None:
        """Update weights; what comes behind uses them afterwards."""
        updating = self.updating[node.operation.name]
        given: dict[int, Tensor] = {}
        rows: list[Tensor] = []
        for pair in updating.sparse:
            layouts = [inputs[k].layout for k in pair]
            if isinstance(layouts[0], Sharded) and layouts[0] == layouts[1]:
                given.update({k: cast("Tensor", inputs[k].local) for k in pair})
                rows += [given[k] for k in pair]
            else:
                given.update({k: self.whole(inputs[k]) for k in pair})
        for k, value in enumerate(inputs):
            if k not in given:
                part = self.partial if value.is_partial else self.whole
                given[k] = part(value)
        every = [given[k] for k in range(len(inputs))]
        keys: list[Any] | None = None
        if updating.uses is not None:
            keys = [self.values[t.name].whole for t in updating.uses]
        level = self.order.update(keys, every)
        self.updates.append(Update(node.operation.name, every, level, rows))

    def _constant(self, node: Node) -> Value:
        (whole,) = self.builder.copy(node.operation, (), is_repeated=True)
        shape = node.static_shape()
        known = constant(node.operation)
        return Value(REPLICATED, whole=whole, shape=shape, known=known)

    def by_rule(
        self, node: Node, inputs: Sequence[Value]
    ) -> list[Value] | None:
        """Lay out an operation; None: it is computed once."""
        if node.type in BY_PLACES and any(v.numbers for v in inputs):
            found = BY_PLACES[node.type](self, node, *inputs)
            if found is not None:
                return found
        rule, axes = RULES.get(node.type), AXES.get(node.type)
        if compat.op_definition(node.type) is None:
            # A function is called by an operation that is named after it.
            rule = RULES["PartitionedCall"]
        divided = not all(value.is_replicated for value in inputs)
        if not divided and node.type not in ALWAYS:
            return None
        if node.type in OF_LISTS and not self.lists:
            return None
        if any(v.shape is None for v in inputs if v.sharded is not None):
            return None
        if rule is not None:
            return rule(self, node, *inputs)
        factors = None if axes is None else axes(node, *inputs)
        return None if factors is None else self.divided(node, inputs, factors)

    def divided(
        self, node: Node, inputs: Sequence[Value], factors: Factors
    ) -> list[Value] | None:
        """Divide an operation by an axis of its inputs; None: it cannot be.

        Args:
            node: the operation.
            inputs: its inputs.
            factors: which of the axes of its inputs and outputs are the same.
        """
        if any(isinstance(value.layout, ListOf) for value in inputs):
            return None
        every = factors.labels(inputs)
        found = self._chosen(inputs, every, factors)
        if found is None:
            return self._linear(node, inputs, factors)
        label, layout = found
        given: list[Tensor] = []
        for index, value in enumerate(inputs):
            own = factors.given.get(index)
            if own is None and label in every[index]:
                axis = every[index].index(label)
                own = self.rows(value, layout.along(axis))
                if own is None:
                    return None
                if factors.needs_rows:
                    own = self._with_a_row(own, layout.along(axis))
            given.append(self.local(value) if own is None else own)
        layouts = [
            layout.along(labels.index(label))
            if labels is not None and label in labels
            else PARTIAL
            for labels in factors.outputs
        ]
        shapes = [
            local_shape(shape, own)
            for shape, own in zip(node.shapes, layouts, strict=True)
        ]
        locals_ = self.builder.copy(
            node.operation, given, shapes, factors.attributes
        )
        if factors.needs_rows:
            locals_ = [
                self._without_a_row(local, own, layout)
                for local, own in zip(locals_, layouts, strict=True)
            ]
        sizes = factors.shapes(inputs)
        return [
            Value(own, local, shape=shape)
            for own, local, shape in zip(layouts, locals_, sizes, strict=True)
        ]

    def _with_a_row(self, tensor: Tensor, layout: Sharded) -> Tensor:
        """Return rows, and where there are none a row of zeros for one unit."""
        build, rank = self.builder, tensor.shape.rank or 0
        none, one = build.constant(0, SIZE), build.constant(1, SIZE)
        least = build.op(
            "Maximum", [layout.unit.count, one], (), is_repeated=True
        )
        more = build.op("Sub", [least, layout.unit.count], (), is_repeated=True)
        more = self.times(layout.count, more)
        behind = [more if a == layout.axis else none for a in range(rank)]
        ends = [self.vector([none] * rank, SIZE), self.vector(behind, SIZE)]
        widths = build.op("Pack", ends, (rank, 2), is_repeated=True, axis=1)
        return build.op("Pad", [tensor, widths], tensor.shape)

    def _without_a_row(
        self, tensor: Tensor, own: Layout, layout: Sharded
    ) -> Tensor:
        """Return what was computed of rows that are there."""
        build, count = self.builder, layout.unit.count
        if isinstance(own, Sharded):
            rank = tensor.shape.rank or 0
            length = self.times(own.count, count)
            every = build.constant(-1, SIZE)
            sizes = [length if a == own.axis else every for a in range(rank)]
            begin = build.constant([0] * rank, SIZE)
            given = [tensor, begin, self.vector(sizes, SIZE)]
            return build.op("Slice", given, tensor.shape)
        some = build.op("Greater", [count, build.constant(0, SIZE)], ())
        zeros = build.op("ZerosLike", [tensor], tensor.shape)
        return build.op("SelectV2", [some, tensor, zeros], tensor.shape)

    def _chosen(
        self,
        inputs: Sequence[Value],
        every: Sequence[Labels],
        factors: Factors,
    ) -> tuple[Any, Sharded] | None:
        """The axis by which an operation is divided, and how it is."""
        for value, labels in zip(inputs, every, strict=True):
            layout = value.sharded
            label = None if layout is None else labels[layout.axis]
            if layout is not None and factors.may_divide(label):
                return label, layout
        if all(value.sharded is None for value in inputs):
            return None
        # Something has to be gathered; the rest may be divided nevertheless.
        for value, labels in zip(inputs, every, strict=True):
            for axis, size in enumerate(value.shape or ()):
                if not isinstance(size, Size) or axis >= len(labels):
                    continue
                layout = Sharded(axis, self.unit)
                rows = layout.units_in(size)
                if rows and factors.may_divide(labels[axis]):
                    return labels[axis], dataclasses.replace(layout, rows=rows)
        return None

    def _linear(
        self, node: Node, inputs: Sequence[Value], factors: Factors
    ) -> list[Value] | None:
        """What is linear leaves parts of a sum parts of a sum."""
        if any(value.sharded is not None for value in inputs):
            return None
        parts = {k for k, value in enumerate(inputs) if value.is_partial}
        groups = [group for group in factors.linear if parts <= group]
        if not parts or not groups:
            return None
        given = [
            self.partial(value) if k in groups[0] else self.local(value)
            for k, value in enumerate(inputs)
        ]
        given = [factors.given.get(k, own) for k, own in enumerate(given)]
        locals_ = self.builder.copy(node.operation, given)
        sizes = factors.shapes(inputs)
        outputs = [
            Value(PARTIAL, local, shape=shape)
            for local, shape in zip(locals_, sizes, strict=True)
        ]
        for index, value in enumerate(outputs):
            if len(parts) == 1 and self._keeps_size(node, index, *parts):
                value.linear = node.operation, index, list(inputs)
        return outputs

    @staticmethod
    def _keeps_size(node: Node, index: int, part: int) -> bool:
        """Whether an output is as large as an input, and of the same dtype."""
        before, after = node.operation.inputs[part], node.operation.outputs
        sizes = [t.shape.num_elements() for t in (before, after[index])]
        alike = before.dtype == after[index].dtype
        return alike and sizes[0] is not None and sizes[0] == sizes[1]

    def computed_by_towers(
        self, node: Node, given: Sequence[Tensor], *layouts: Layout
    ) -> list[Value]:
        """Have towers compute an operation of what they are given.

        Args:
            node: the operation.
            given: its inputs.
            *layouts: those of its outputs.
        """
        sizes = [
            local_shape(shape, layout)
            for shape, layout in zip(node.shapes, layouts, strict=True)
        ]
        found = self.builder.copy(node.operation, given, sizes)
        return [
            Value(layout, local)
            for layout, local in zip(layouts, found, strict=True)
        ]

    def computed_once(self, node: Node, inputs: Sequence[Value]) -> list[Value]:
        """Compute an operation as one device does, for all towers."""
        if any(not v.is_replicated and not v.is_partial for v in inputs):
            self.once.append(node.operation)
        effect = effect_of(node.operation)
        if effect:
            return self._with_effect(node, inputs, effect)
        if not self._is_on_towers(node, inputs):
            given = [self.whole(value) for value in inputs]
            return [Value(REPLICATED, whole=t) for t in self._done(node, given)]
        own = [self.local(value) for value in inputs]
        wholes = [value.whole for value in inputs if value.whole is not None]
        is_there = len(wholes) == len(own) and (
            self.order.after(node, wholes, True)
            <= self.order.after(node, own, True)
        )
        results = [Value(REPLICATED, t) for t in self._done(node, own)]
        if is_there:
            # What is computed once may need it, too.
            for value, whole in zip(
                results, self._done(node, wholes), strict=True
            ):
                value.whole = whole
        return results

    def _with_effect(
        self, node: Node, inputs: Sequence[Value], effect: Effect
    ) -> list[Value]:
        """Do what has an effect as often as one device does, for all."""
        if not self.builder.meets:
            raise NeedsExchange
        variables = written(node.operation)
        mirrored = [k for k in variables if self._has_local(inputs[k])]
        if effect is Effect.ALIKE and variables and mirrored == variables:
            # Each tower writes its own copies.
            own = [self.local(value) for value in inputs]
            made = self._done(node, own, reads=False)
            return [Value(REPLICATED, local) for local in made]
        at_root = self.ranks and effect is Effect.OUTSIDE
        wholes = [self.whole(value) for value in inputs]
        results = self._done(node, wholes, reads=False, at_root=at_root)
        if at_root:
            results = [self._from_root(whole) for whole in results]
        for index in variables if at_root else mirrored:
            self._copy_to_all(node, index, inputs[index], at_root)
        return [Value(REPLICATED, whole=whole) for whole in results]

    def _done(
        self,
        node: Node,
        given: Sequence[Tensor],
        reads: bool = True,
        at_root: bool = False,
    ) -> list[Tensor]:
        """Add an operation behind what uses the same resources.

        Args:
            node: the operation.
            given: its inputs.
            reads: whether it reads resources only.
            at_root: whether of several processes only the first does it.
        """
        least = self.order.after(node, given, reads)
        results = self.builder.copy(
            node.operation,
            given,
            least=least,
            has_effect=not reads,
            at_root=at_root,
        )
        self.order.note_use(node, given, reads, least)
        return results

    def _from_root(self, whole: Tensor) -> Tensor:
        """Return for all processes what the first has computed."""
        build = self.builder
        if whole.dtype == tf.resource:
            # Loops return the handles that they are given.
            return whole
        if whole.dtype != tf.variant:
            return build.exchange("root", whole)
        # A list of tensors travels as a text.
        (text,) = build.add(
            "SerializeTensor",
            [whole],
            {"T": attribute(tf.variant)},
            [(tf.string, tf.TensorShape(()))],
            at_root=True,
        )
        given = build.exchange("root", text)
        return build.op(
            "ParseTensor", [given], whole.shape, out_type=tf.variant
        )

    def _copy_to_all(
        self, node: Node, index: int, variable: Value, at_root: bool
    ) -> None:
        """Have all write what was written once to a variable.

        Args:
            node: what has written it.
            index: which of its inputs the variable's handle is.
            variable: the handle.
            at_root: whether only the first process has written it.
        """
        build, handle = self.builder, self.whole(variable)
        dtype, shape = variable_spec(node.operation.inputs[index])
        attributes = {"dtype": attribute(dtype)}
        (value,) = build.add(
            "ReadVariableOp",
            [handle],
            attributes,
            [(dtype, shape)],
            least=self.order.after(node, [handle], True),
        )
        if at_root:
            value = build.exchange("root", value)
        given = [self.local(variable), value]
        attributes["validate_shape"] = attribute(False)
        least = self.order.after(node, given, False)
        build.add(
            "AssignVariableOp",
            given,
            attributes,
            [],
            least=least,
            has_effect=True,
        )
        self.order.note_use(node, given, False, least)

    def _is_on_towers(self, node: Node, inputs: Sequence[Value]) -> bool:
        """Whether all towers have what an operation needs.

        What little they have is not worth an exchange, and what they have of
        mirrored variables nobody has to send them.
        """
        if not all(value.is_replicated for value in inputs):
            return False
        given = list(zip(inputs, node.operation.inputs, strict=True))
        if any(
            t.dtype == tf.resource and not self._has_local(v) for v, t in given
        ):
            return False
        own = [(v, t.shape) for v, t in given if self._has_local(v)]
        small = all(is_small(shape) for shape in node.shapes)
        if small and any(value.whole is None for value, _ in own):
            return True
        return any(
            value.whole is not None or not is_small(shape)
            for value, shape in own
        ) and all(
            self._has_local(v) or is_small(t.shape) or self._is_repeated(v)
            for v, t in given
        )

    @staticmethod
    def _has_local(value: Value) -> bool:
        """Whether each tower has the value of one device itself."""
        return value.layout == REPLICATED and value.local is not None

    @staticmethod
    def _is_repeated(value: Value) -> bool:
        """Whether every function that needs a value makes it anew."""
        operation = None if value.whole is None else value.whole.operation
        return operation is not None and operation.is_repeated

    def _complete(
        self, node: Node, inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> None:
        """Add what the trace knows of shapes, and entries that are known."""
        entries = folded(node, [value.known for value in inputs])
        shapes = self._symbolic(node, inputs)
        for index, value in enumerate(outputs):
            if isinstance(value.layout, ListOf):
                continue
            if entries is not None and value.known is None:
                value.known = entries[index]
            static = node.static_shape(index)
            if static is None:
                continue
            sizes: list[Any] = list(static)
            for own in (value.shape, shapes[index] if shapes else None):
                if own is not None and len(own) == len(sizes):
                    sizes = [
                        mine if size is None else size
                        for size, mine in zip(sizes, own, strict=True)
                    ]
            if value.sharded is not None:
                sizes[value.sharded.axis] = value.sharded.size
            value.shape = tuple(sizes)

    @staticmethod
    def _symbolic(node: Node, inputs: Sequence[Value]) -> Any:
        """The shapes of outputs, where the trace does not know them."""
        if all(shape.is_fully_defined() for shape in node.shapes):
            return None
        if node.type in SHAPES:
            return SHAPES[node.type](node, *inputs)
        if node.type not in AXES or any(v.shape is None for v in inputs):
            return None
        factors = AXES[node.type](node, *inputs)
        return None if factors is None else factors.shapes(inputs)


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
