"""Nodes: the traced operations as rules see them, and their scope.

``layout_pass.py`` makes a ``Node`` of each operation, and passes it to the
rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.builder import Builder, static
from keras_towers.partition.ir.layouts import (
    InputLayout,
    Layout,
    Shape,
    Sharded,
    local_shape,
    sizes_of,
)
from keras_towers.partition.ir.program import (
    Attributes,
    Event,
    Exchange,
    Tensor,
)
from keras_towers.partition.ir.reasons import SHAPE, require
from keras_towers.partition.ir.registry import OperationFacts, facts_of
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension, symbol
from keras_towers.partition.ir.values import Value, Values
from keras_towers.partition.layout.list_conversions import ListConverter
from keras_towers.partition.layout.resources import VariableContents
from keras_towers.partition.layout.units import Units


@dataclasses.dataclass(frozen=True, eq=False)
class Marks:
    """The roles of single operations of a step, by name.

    Attributes:
        layouts: for operations that return gradients to an optimizer, how to
            lay these out.
        gradients: for operations that add up terms of a gradient, the name of
            its tensor.
        updates: for operations of optimizers' updates, where they run if they
            are computed once; "": on the first tower.
        exchanges: in the graph of a column, for operations that stand for
            exchanges with the other columns, which these are.
    """

    layouts: Mapping[str, Sequence[InputLayout]]
    gradients: Mapping[str, str]
    updates: Mapping[str, str]
    exchanges: Mapping[str, Exchange]


_NO_MARKS = Marks({}, {}, {}, {})


class Scope:
    """A graph that is being laid out, or a function that it calls.

    Args:
        converter: converts values of the graph.
        marks: what is asked of single operations.
        around: for a function, the scope of its caller.

    Attributes:
        builder: adds operations, and exchanges, to the program or the function.
        units: the units that rows are counted in.
        converter: converts values to layouts.
        variables: what variables hold.
        options: the options of the layout.
        marks: what is asked of single operations.
        updates_follow: what reads of variables by updates follow.
        computed_once: traced operations that take rows, but are not divided,
            and why.
        graphs: the graphs that were laid out.
        values: the values of the current graph, by the names of its tensors.
        variances: the values of variances whose operations follow, as they have
            been exchanged together with their means.
        lay_out_node: lays out an operation instead of the rules; None: nothing
            does.
    """

    def __init__(
        self,
        converter: ListConverter,
        marks: Marks = _NO_MARKS,
        around: Scope | None = None,
    ):
        self.builder: Builder = converter.builder
        self.units: Units = converter.units
        self.converter = converter
        self.variables: VariableContents = VariableContents(
            converter, None if around is None else around.variables
        )
        self.options = converter.options
        self.marks = marks
        self.updates_follow: Sequence[Event] = ()
        self.computed_once: dict[tf.Operation, str] = {}
        self.graphs: list[tf.Graph] = []
        if around is not None:
            self.computed_once = around.computed_once
            self.graphs = around.graphs
        self.values: dict[str, Value] = {}
        self.variances: dict[tf.Operation, Value] = {}
        self.lay_out_node: Callable[[Node, list[Value]], Values] | None = None

    def of_function(self, **options: object) -> Scope:
        """Return the scope of a function that towers call.

        Args:
            **options: the options that differ.
        """
        return self._inside(self.units.in_function(self._builder()), **options)

    def of_round(
        self, lay_out_node: Callable[[Node, list[Value]], Values]
    ) -> Scope:
        """Return the scope of a loop's round that has a single row.

        No value in it is sharded, and nothing is computed once for all towers.

        Args:
            lay_out_node: lays out its operations.
        """
        no_unit = dataclasses.replace(self.units.of_batch, size=symbol("none"))
        scope = self._inside(Units(self._builder(), no_unit, self.units))
        scope.computed_once = {}
        scope.lay_out_node = lay_out_node
        return scope

    def restore_computed_once(self, before: Mapping[tf.Operation, str]) -> None:
        """Forget the operations that a failed attempt has computed once."""
        self.computed_once.clear()
        self.computed_once.update(before)

    def _builder(self) -> Builder:
        return Builder(can_exchange=False)

    def _inside(self, units: Units, **options: Any) -> Scope:
        changed = dataclasses.replace(self.options, **options)
        firsts = self.converter.is_first, self.converter.is_first_micro_batch
        return Scope(ListConverter(units, *firsts, changed), around=self)


class Node:
    """An operation of the traced graph that is being laid out.

    Attributes:
        operation: the operation.
        type: the type of the operation.
        facts: what is known of operations of this type; nothing is if a rule
            has a mistake.
        scope: the graph, or the function, that it belongs to.
        builder: adds operations there.
        units: the units of rows there.
        converter: converts values there.
        variables: what variables hold there.
        options: the options of the layout there.
        reason: why it is not divided, once that is known.
    """

    def __init__(self, operation: tf.Operation, scope: Scope):
        self.operation = operation
        self.type: str = operation.type
        # The type of a legacy call is the name of the function.
        is_call = compat.op_definition(self.type) is None
        known_as = "PartitionedCall" if is_call else self.type
        self.facts: OperationFacts = facts_of(known_as)
        if self.type in scope.options.undivided:
            self.facts = OperationFacts()
        self.scope = scope
        self.builder = scope.builder
        self.units = scope.units
        self.converter = scope.converter
        self.variables = scope.variables
        self.options = scope.options
        self.reason = ""

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return len(self.operation.outputs)

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """The traced shapes of the outputs."""
        return [tensor.shape for tensor in self.operation.outputs]

    @property
    def must_be_compiled(self) -> bool:
        """Whether it calls a function that XLA compiles apart from the rest."""
        if not self.type.endswith("PartitionedCall"):
            return False
        with_rest = self.options.xla
        attributes = self.operation.node_def.attr
        return not with_rest and attributes["_XlaMustCompile"].b

    def attr(self, name: str) -> Any:
        """Return an attribute."""
        return self.operation.get_attr(name)

    def dtype(self, index: int) -> tf.DType:
        """Return the dtype of an input."""
        return self.operation.inputs[index].dtype

    def output_dtype(self, index: int = 0) -> tf.DType:
        """Return the dtype of an output."""
        return self.operation.outputs[index].dtype

    def requested_shape(self, target: Value) -> Shape:
        """Return the shape of the output, which is an input of the operation.

        Args:
            target: the input that is the shape.

        Raises:
            NotDivided: its rank is unknown.
        """
        require(self.shapes[0].rank is not None, SHAPE)
        traced = sizes_of(self.shapes[0])
        if target.known is None:
            return traced
        return tuple(
            size if known is UNKNOWN or known == -1 else known
            for known, size in zip(np.ravel(target.known), traced, strict=True)
        )

    def copy(
        self,
        operands: Sequence[Tensor],
        shapes: Sequence[tf.TensorShape] | None = None,
        attributes: Attributes | None = None,
        **options: object,
    ) -> list[Tensor]:
        """Add the operation with other inputs, as ``Builder.copy`` does."""
        return self.builder.copy(
            self.operation, operands, shapes, attributes, **options
        )

    def run_on_towers(
        self,
        operands: Sequence[Tensor],
        *layouts: Layout,
        shapes: Sequence[Sequence[Dimension] | None] | None = None,
        attributes: Attributes | None = None,
    ) -> Values:
        """Run the operation on every tower; return its N outputs.

        Args:
            operands: the local inputs.
            *layouts: the layouts of the N outputs.
            shapes: the global shapes of the N outputs; None: as traced.
            attributes: the attributes that differ from the trace.
        """
        sizes = shapes or [None] * len(layouts)
        specs = []
        for traced, size, layout in zip(
            self.shapes, sizes, layouts, strict=True
        ):
            if size is not None:
                traced = traced.merge_with(static(size))
            specs.append(local_shape(traced, layout))
        # Attributes that are the shapes of outputs have the global sizes.
        known = {"shape": next(iter(specs), None), "output_shapes": specs}
        named = known.keys() & self.operation.node_def.attr
        own = {key: known[key] for key in named}
        outputs = self.copy(operands, specs, {**own, **(attributes or {})})
        return [
            Value(layout, local, shape=None if size is None else tuple(size))
            for layout, local, size in zip(layouts, outputs, sizes, strict=True)
        ]

    def run_with_shape(
        self,
        inputs: Values,
        target: int,
        sizes: Sequence[Dimension],
        layout: Sharded,
    ) -> Values:
        """Run an operation that takes a shape on every tower.

        Args:
            inputs: its inputs. The sharded ones are passed on as local rows.
            target: the index of the input that is the shape.
            sizes: the entries of the global shape.
            layout: the layout of the output.
        """
        operands = [
            value.own if value.sharded else self.converter.replicate(value)
            for value in inputs
        ]
        operands[target] = self.converter.local_target(
            inputs[target], sizes, layout
        )
        return self.run_on_towers(operands, layout, shapes=[sizes])
