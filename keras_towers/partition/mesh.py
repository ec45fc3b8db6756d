"""Divides a step over a mesh of two dimensions: the layout pass runs twice.

The rows of the mesh are towers, which divide the examples. Each tower has a
device in every column, and columns divide weights and what is computed with
them: tensor parallelism, as in Megatron-LM (Shoeybi et al., arXiv 1909.08053)
and, for any graph, in GSPMD (arXiv 2105.04663). First the step is laid out over
the columns of one tower, which has all examples. The result is written as the
graph of one column, in which exchanges between columns are operations. Then
this graph is laid out over towers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.emission import emit, placeholder_of, value_of
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    AllExamples,
    InputLayout,
    InShards,
    MeshLayout,
    Sharded,
)
from keras_towers.partition.ir.program import (
    ColumnInput,
    Exchange,
    Operation,
    Program,
    Tensor,
    changed_program,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.layout.column_exchanges import as_operation
from keras_towers.partition.layout.conversions import LayoutOptions
from keras_towers.partition.layout.traced_graph import partition_graph
from keras_towers.partition.timeline.gathers import place_earliest

# What columns gather, towers gather again.
_ANY = 2**62


def partition_over_mesh(
    graph: tf.Graph,
    layouts: Sequence[InputLayout],
    in_columns: Mapping[int, InShards],
    wanted: Sequence[tf.Tensor],
    gradients: Mapping[str, Sequence[MeshLayout]],
    updates: Mapping[str, str],
    columns: int,
    options: LayoutOptions,
) -> Program:
    """Lay out a graph over towers, and over the columns of each tower.

    Args:
        graph: the trace of the one-device step.
        layouts: the layouts of its N inputs over towers.
        in_columns: the inputs that columns divide, by their index.
        wanted: the tensors of the graph that the program returns.
        gradients: as for ``partition_graph``, with the layouts over the mesh.
        updates: as for ``partition_graph``; empty with several columns.
        columns: the number of columns.
        options: the options of the layout over towers.
    """
    over_towers = {k: [g.towers for g in each] for k, each in gradients.items()}
    if columns == 1:
        return partition_graph(
            graph, layouts, wanted, over_towers, updates, options=options
        )
    over_columns = {
        k: [g.columns or REPLICATED for g in each]
        for k, each in gradients.items()
    }
    inner = partition_graph(
        graph,
        [
            in_columns.get(index, _of_one_tower(layout))
            for index, layout in enumerate(layouts)
        ],
        wanted,
        gradients=over_columns,
        options=LayoutOptions(
            xla=options.xla,
            examples=options.examples,
            over_columns=True,
        ),
    )
    by_rows = (k for k, layout in enumerate(layouts) if _has_examples(layout))
    column = _ColumnGraph(inner, next(by_rows, None))
    program = partition_graph(
        column.graph,
        [
            *(
                REPLICATED if index in in_columns else layout
                for index, layout in enumerate(layouts)
            ),
            *(
                layouts[own.key] if own.kind == "handle" else REPLICATED
                for own in column.inputs
            ),
        ],
        column.graph.outputs,
        # Where columns update all weights, an operation returns none.
        gradients={
            column.names[k]: layouts
            for k, layouts in over_towers.items()
            if layouts
        },
        of_columns=column.inputs,
        exchanges=column.exchanges,
        options=options,
    )
    return _with_sources(program, column)


def _of_one_tower(layout: InputLayout) -> InputLayout:
    """Return the layout of an input that all columns of a tower have."""
    return AllExamples() if _has_examples(layout) else REPLICATED


def _has_examples(layout: InputLayout) -> bool:
    """Whether the rows of an input are examples, not entries of an example."""
    return layout == Sharded(0)


class _ColumnGraph:
    """The graph of one column of a mesh, written from a program over columns.

    Args:
        program: the layout of a step over columns.
        rows: the index of an input whose rows are examples, if there is one.

    Attributes:
        graph: the graph. Its first inputs are those of the step.
        inputs: its other inputs.
        names: the names of its operations, by those of the traced ones.
        sources: the traced operations, by the names of its operations.
        operations: the operations of the program, by name in the graph.
        exchanges: the exchanges of the program, by name in the graph.
    """

    def __init__(self, program: Program, rows: int | None):
        self.graph = compat.FuncGraph("column")
        self.inputs: list[ColumnInput] = []
        self.names: dict[str, str] = {}
        self.sources: dict[str, tf.Operation] = {}
        self.operations: dict[str, Operation] = {}
        self.exchanges: dict[str, Exchange] = {}
        self._program, self._rows = program, rows
        source = program.inputs
        with self.graph.as_default():
            self._known: dict[Tensor, tf.Tensor] = {
                tensor: placeholder_of(tensor) for tensor in source.of_graph
            }
            inputs = list(self._known.values())
            for index, copy in source.copies.items():
                inputs.append(self._add_input("handle", copy, index))
            for size, (_, start) in source.shares.items():
                inputs.append(self._add_input("start", start, size))
            inputs.append(self._add_input("is_first", source.is_first))
            self._add_sizes(inputs)
            timeline = place_earliest(program, TensorSizes(program, 1, 1), _ANY)
            groups = itertools.groupby(timeline.program.events, type)
            for kind, events in groups:
                add: Any = self._add_operations
                if kind is Exchange:
                    add = self._add_exchanges
                add(list(events))
            self.graph.outputs = [
                value_of(t, self._known) for t in program.results
            ]
        self.graph.inputs = inputs

    def _add_input(
        self,
        kind: Literal["handle", "start", "is_first"],
        tensor: Tensor,
        key: int = 0,
    ) -> tf.Tensor:
        self.inputs.append(ColumnInput(kind, key))
        self._known[tensor] = placeholder_of(tensor)
        return self._known[tensor]

    def _add_sizes(self, inputs: Sequence[tf.Tensor]) -> None:
        """Add the sizes that the program takes from its inputs."""
        sizes = self._program.inputs.sizes
        for name, tensor in sizes.items():
            index, axis = map(int, name.split("."))
            shape = tf.shape(inputs[index], tf.int64)
            self._known[tensor] = shape[axis]
        if self._rows is not None:
            count = tf.shape(inputs[self._rows], tf.int64)[0]
            self._known[self._program.inputs.total] = count

    def _add_operations(self, operations: Sequence[Operation]) -> None:
        outputs = [
            tensor
            for operation in operations
            if not operation.is_repeated
            for tensor in operation.outputs
        ]
        names: dict[int, str] = {}
        values = emit(
            operations, self._known, outputs, self._program.graphs, names=names
        )
        self._known.update(zip(outputs, values, strict=True))
        for tensor, value in zip(outputs, values, strict=True):
            # TensorFlow infers less than some functions of Python set.
            value.set_shape(tensor.shape)
        for operation in operations:
            if operation.is_repeated:
                continue
            # TensorFlow renames what is named like a scope.
            name = names[id(operation)]
            if operation.outputs:
                name = self._known[operation.outputs[0]].op.name
            self.operations[name] = operation
            if operation.source is not None:
                self.sources[name] = operation.source
                self.names.setdefault(operation.source.name, name)

    def _add_exchanges(self, exchanges: Sequence[Exchange]) -> None:
        for exchange in exchanges:
            operation = as_operation(exchange)
            (value,) = emit([operation], self._known, operation.outputs)
            self._known[exchange.result] = value
            self.exchanges[value.op.name] = exchange

    def traced_name(self, tensor: str) -> str:
        """Return the name of a traced tensor, given that of the graph."""
        name, _, index = tensor.partition(":")
        return f"{self.sources[name].name}:{index}"


def _with_sources(program: Program, column: _ColumnGraph) -> Program:
    """Return a program whose operations refer to those of the traced step."""

    def of_trace(operation: Operation) -> Mapping[str, object]:
        first = column.operations.get(operation.name)
        source = operation.source
        return {
            "name": "" if first is None else first.name,
            "suffix": (first and first.suffix) or operation.suffix,
            "source": source and column.sources.get(source.name),
        }

    once = {
        column.sources[operation.name]: reason
        for operation, reason in program.computed_once.items()
        if operation.name in column.sources
    }
    changed = changed_program(program, of_trace)
    events = [
        dataclasses.replace(e, gradient=column.traced_name(e.gradient))
        if isinstance(e, Exchange) and e.gradient
        else e
        for e in changed.events
    ]
    return dataclasses.replace(changed, events=events, computed_once=once)
