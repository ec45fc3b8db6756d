"""Reads a traced graph, with the layouts of its inputs, into a program.

``partition_graph`` is where the package begins: ``fit/step/global_step.py``
calls it with the trace of a step. ``layout_pass.py`` then lays out operation
after operation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.partition.ir.axes import BATCH, COLUMNS, ONCE, TOWERS, Axes
from keras_towers.partition.ir.builder import SIZE_DTYPE, Builder
from keras_towers.partition.ir.effects import is_draw, is_variable
from keras_towers.partition.ir.estimated_work import work_of
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    AllExamples,
    Fixed,
    InputLayout,
    InShards,
    Mirrored,
    Replicated,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
    Unit,
    local_shape,
    sizes_of,
)
from keras_towers.partition.ir.program import (
    ColumnInput,
    Exchange,
    Inputs,
    Operation,
    Program,
    Tensor,
    mapped_edges,
    prune,
)
from keras_towers.partition.ir.sizes import (
    ASSUMED_LENGTH,
    EXAMPLES,
    UNKNOWN,
    Dimension,
    symbol,
    symbol_name,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.ir.values import Value
from keras_towers.partition.layout.conversions import LayoutOptions
from keras_towers.partition.layout.layout_pass import Mistake, lay_out_graph
from keras_towers.partition.layout.list_conversions import (
    CannotGather,
    ListConverter,
)
from keras_towers.partition.layout.nodes import Marks, Scope
from keras_towers.partition.layout.rules.control_flow import has_control_flow_v1
from keras_towers.partition.layout.rules.row_numbers import index_value
from keras_towers.partition.layout.rules.row_splits import splits_value
from keras_towers.partition.layout.units import Units

_DEFAULTS = LayoutOptions()
_NOTHING = symbol("nothing")
# The exchange of a byte takes about as long as so many multiplications.
_WORK_PER_BYTE = 100
# Operations that add up or pass on the terms of a gradient, or scale them.
_ADDS = frozenset(("Add", "AddN", "AddV2", "Cast", "Identity", "IdentityN"))
_SCALES = frozenset(("Mul", "RealDiv"))


def partition_graph(
    graph: tf.Graph,
    layouts: Sequence[InputLayout],
    wanted: Sequence[tf.Tensor],
    gradients: Mapping[str, Sequence[InputLayout]] = MappingProxyType({}),
    updates: Mapping[str, str] = MappingProxyType({}),
    of_columns: Sequence[ColumnInput] = (),
    exchanges: Mapping[str, Exchange] = MappingProxyType({}),
    options: LayoutOptions = _DEFAULTS,
) -> Program:
    """Lay out a traced graph over towers.

    Args:
        graph: the trace of the one-device step.
        layouts: the layouts of its N inputs.
        wanted: the tensors of the graph that the program returns.
        gradients: the operations that return gradients, and components of
            gradients, to an optimizer, by name: how to lay out each of them.
        updates: the operations of optimizers' updates, as in ``Marks``.
        of_columns: what the last inputs are, which differ between columns.
        exchanges: the operations that stand for exchanges, as in ``Marks``.
        options: the options of the layout.
    """
    if has_control_flow_v1(graph):
        raise TowerError(
            "the step has a loop or a branch of TensorFlow 1 (Enter, Switch), "
            "such as one of an imported GraphDef, which towers cannot divide: "
            "import it in tf.compat.v1.wrap_function, and call that."
        )
    given = _GraphInputs(graph, layouts, of_columns, options)
    given.add_shares(itertools.chain(layouts, *gradients.values()))
    inputs = given.inputs
    terms = _terms_of(graph, gradients, exchanges)
    marks = Marks(gradients, terms, updates, exchanges)
    converter = ListConverter(
        given.units, inputs.is_first, inputs.is_first_micro_batch, options
    )
    scope = Scope(converter, marks)
    values = given.values()
    given.add_copies(values, scope)
    args = graph, layouts, wanted, gradients, updates, of_columns, exchanges
    lay_out_again = functools.partial(partition_graph, *args)
    replace = functools.partial(dataclasses.replace, options)
    try:
        by_name = lay_out_graph(scope, graph, values)
    except CannotGather:
        # An operation without a rule takes a list of rows.
        return lay_out_again(replace(lists=False))
    except Mistake as mistake:
        undivided = mistake.after(options.undivided)
        return lay_out_again(replace(undivided=undivided))
    results = [converter.assemble(by_name[tensor.name]) for tensor in wanted]
    program = _program(scope, inputs, results, by_name)
    if options.may_coincide or not _has_other_layout(program, given.units):
        return program
    return _cheaper(program, lay_out_again(replace(may_coincide=True)))


class _GraphInputs:
    """The inputs of a graph, and the units that their rows are counted in.

    Args:
        graph: the graph.
        layouts: the layouts of its N inputs.
        of_columns: as for ``partition_graph``.
        options: the options of the layout.

    Attributes:
        inputs: those of the program.
        units: the units.
    """

    def __init__(
        self,
        graph: tf.Graph,
        layouts: Sequence[InputLayout],
        of_columns: Sequence[ColumnInput],
        options: LayoutOptions,
    ):
        tensors = list(map(_tensor, graph.inputs, layouts))
        first = len(tensors) - len(of_columns)
        tensors[first:] = [
            dataclasses.replace(tensor, axes=tensor.axes | COLUMNS)
            for tensor in tensors[first:]
        ]
        self._each = list(zip(graph.inputs, tensors, layouts, strict=True))
        self._sizes: dict[str, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        self._shares: dict[int, tuple[Tensor, Tensor]] = {}
        self.inputs = Inputs(
            of_graph=tensors,
            start=_scalar(BATCH),
            total=_scalar(ONCE),
            is_first=_scalar(options.axes, tf.bool),
            is_first_micro_batch=_scalar(BATCH, tf.bool),
            sizes=self._sizes,
            copies=self._copies,
            shares=self._shares,
            of_columns=of_columns,
        )
        self._shard_axes = options.shard_axes
        self._builder = Builder()
        total = self.inputs.total
        size, count = self._examples()
        examples = Unit(size, count, self.inputs.start, total)
        self.units = Units(self._builder, examples)
        self.units.sizes[symbol_name(EXAMPLES)] = total

    def _examples(self) -> tuple[Dimension, Tensor]:
        """Return the global and the local number of examples.

        If no input has rows, everything is computed once, and the local number
        does not matter.
        """
        builder, count = self._builder, self.inputs.total
        if any(isinstance(layout, AllExamples) for _, _, layout in self._each):
            # No size is a multiple of what is not there.
            return _NOTHING, count
        for traced, own, layout in self._each:
            if isinstance(layout, Sharded) and layout.unit is None:
                size: Dimension | None = traced.shape[layout.axis]
                if size is None:
                    size = EXAMPLES
                else:
                    size = size // layout.rows_per_unit
                return size, self._number_of_units(own, layout)
            if isinstance(layout, RowSplits):
                ends = builder.axis_size(own)
                count = builder.compute_size("Sub", ends, 1)
            elif isinstance(layout, SparseShape):
                count = builder.vector_entry(own, 0)
        return EXAMPLES, count

    def _number_of_units(self, tensor: Tensor, layout: Sharded) -> Tensor:
        """Return the number of units in a tower's sharded rows."""
        rows = self._builder.axis_size(tensor, layout.axis)
        if layout.rows_per_unit == 1:
            return rows
        return self._builder.compute_size(
            "FloorDiv", rows, layout.rows_per_unit
        )

    def add_shares(self, layouts: Iterable[InputLayout]) -> None:
        """Add units for variables in shards, and the towers' shares of them."""
        for layout in layouts:
            if not isinstance(layout, InShards) or layout.size in self._shares:
                continue
            count, start = (_scalar(self._shard_axes) for _ in range(2))
            self._shares[layout.size] = count, start
            if layout.rows is not None:
                count = self._builder.constant(layout.rows, SIZE_DTYPE)
            self.units.of_variables[layout.size] = Unit(
                layout.size,
                count,
                start,
                self._builder.constant(layout.size, SIZE_DTYPE),
                of_variables=True,
                local_size=layout.rows,
            )

    def values(self) -> list[Value]:
        """Return the values of inputs; register the symbols in their shapes."""
        values = [self._value(index) for index, _ in enumerate(self._each)]
        of_columns = self.inputs.of_columns
        first = len(values) - len(of_columns)
        for value, of_column in zip(values[first:], of_columns, strict=True):
            if of_column.kind == "start":
                # The other entries of a vector with it stay known.
                value.known = np.array(UNKNOWN, object)
        self.units.sizes.update(self._sizes)
        return values

    def _value(self, index: int) -> Value:
        """Return the value of an input, with symbols for unknown sizes."""
        (traced, tensor, layout), units = self._each[index], self.units
        if isinstance(layout, SparseIndices):
            return _sparse_indices(units, tensor, layout)
        if isinstance(layout, SparseShape):
            return _sparse_shape(units, tensor, layout)
        if isinstance(layout, RowSplits):
            return _row_splits(units, tensor, layout)
        if isinstance(layout, Sharded):
            unit: Any = units.of_batch
            if layout.unit is not None:
                count = self._number_of_units(tensor, layout)
                unit = units.data_dependent_unit(layout.unit, count)
            layout = dataclasses.replace(layout, unit=unit)
        shape: Any = None
        if traced.shape.rank is not None:
            shape = list(sizes_of(traced.shape))
            for axis, size in enumerate(shape):
                name = f"{index}.{axis}"
                if isinstance(layout, Sharded) and axis == layout.axis:
                    shape[axis] = layout.size
                elif isinstance(layout, AllExamples) and not axis:
                    shape[axis] = EXAMPLES if size is UNKNOWN else size
                elif size is UNKNOWN and (
                    "micro_batches" in tensor.axes
                    or isinstance(layout, AllExamples)
                ):
                    shape[axis] = symbol(name)
                    self._sizes[name] = _scalar(ONCE)
            shape = tuple(shape)
        if isinstance(layout, (InShards, Mirrored, Replicated)):
            return Value(REPLICATED, whole=tensor, shape=shape)
        return Value(layout, local=tensor, shape=shape)

    def add_copies(self, values: Sequence[Value], scope: Scope) -> None:
        """Register the copies or shards of inputs on towers.

        Args:
            values: the values of the inputs.
            scope: that of the graph.
        """
        variables = scope.variables
        for index, (_, common, layout) in enumerate(self._each):
            if isinstance(layout, Mirrored):
                copy = dataclasses.replace(common, axes=common.axes | TOWERS)
                self._copies[index] = values[index].local = copy
                if copy.handle is not None:
                    variables.add_copies(common, copy)
            elif isinstance(layout, InShards):
                handle = _handle_of_shards(common.handle, layout)
                axes = common.axes | self._shard_axes
                copy = dataclasses.replace(common, axes=axes, handle=handle)
                self._copies[index] = copy
                rows = self.units.rows_in(layout)
                variables.add_copies(common, copy, rows)


def _scalar(axes: Axes, dtype: tf.DType = SIZE_DTYPE) -> Tensor:
    """Return a scalar that a program gets as an input."""
    return Tensor(dtype, tf.TensorShape(()), axes)


def _tensor(traced: tf.Tensor, layout: InputLayout) -> Tensor:
    """Return the tensor of an input."""
    is_once = isinstance(layout, (InShards, Mirrored, Replicated))
    axes = ONCE if is_once else BATCH
    handle = None
    if traced.dtype == tf.resource and is_variable(traced):
        handle = compat.get_resource_handle_data(traced)
    if isinstance(layout, (RowSplits, SparseIndices)):
        layout = Sharded(0)
    if isinstance(layout, InShards):
        layout = REPLICATED
    shape = local_shape(traced.shape, layout)
    is_fixed = isinstance(layout, Fixed)
    return Tensor(traced.dtype, shape, axes, handle=handle, is_fixed=is_fixed)


def _program(
    scope: Scope,
    inputs: Inputs,
    results: Sequence[Tensor],
    by_name: Mapping[str, Value],
) -> Program:
    """Return the program of the laid out graph, without unused operations."""
    events = prune(scope.builder.events, results)
    kept = set(events)
    sources = {id(e.source) for e in events if isinstance(e, Operation)}
    return Program(
        inputs,
        events,
        mapped_edges(
            scope.variables.before, lambda e: [e] if e in kept else []
        ),
        results,
        scope.graphs,
        {o: why for o, why in scope.computed_once.items() if id(o) in sources},
        by_name,
        scope.converter.replaced_sums,
    )


def _terms_of(
    graph: tf.Graph, gradients: Iterable[str], exchanges: Container[str]
) -> dict[str, str]:
    """Return the gradient that each operation adds up terms of, by name.

    Args:
        graph: the graph.
        gradients: the operations that return gradients, by name.
        exchanges: those that stand for exchanges.
    """
    terms: dict[str, str] = {}

    def type_of(name: str) -> str:
        return str(graph.get_operation_by_name(name).type)

    for name in gradients:
        returns = graph.get_operation_by_name(name)
        for index, gradient in enumerate(returns.inputs):
            of, waiting = f"{name}:{index}", [gradient]
            while waiting:
                tensor = waiting.pop()
                term = tensor.op
                is_linear = term.type in _ADDS | _SCALES
                is_linear = is_linear or term.name in exchanges
                users = {user.name for user in tensor.consumers()} - {name}
                if is_linear and all(terms.get(u) == of for u in users):
                    terms[term.name] = of
                    waiting += term.inputs
    # A factor may be a sum of its own.
    scales = [n for n in terms if type_of(n) in _SCALES]
    return {n: terms[n] for n in terms.keys() - scales}


def _handle_of_shards(whole: Any, layout: InShards) -> Any:
    """Return the handle data of a tower's rows of a variable."""
    data = type(whole)()
    data.CopyFrom(whole)
    rows = -1 if layout.rows is None else layout.rows
    data.shape_and_type[0].shape.dim[layout.axis].size = rows
    return data


# ---- two layouts -------------------------------------------------------------


def _has_other_layout(program: Program, units: Units) -> bool:
    """Whether an undivided axis has as many entries as there are examples.

    Only random draws, and operations that are computed once, count. A step may
    draw so many numbers because it needs one for each example, as a generator
    of images does, or by coincidence, for a weight of that length. A layout
    without rows is right in both cases.
    """
    size = units.of_batch.size
    if not isinstance(size, int) or size < 2:
        return False
    return any(
        units.find_rows(0, length or 0, may_coincide=True)
        for source in _undivided(program)
        if is_draw(source.type) or source in program.computed_once
        for output in source.outputs
        for length in (output.shape if output.shape.rank else ())
    )


def _cheaper(program: Program, other: Program) -> Program:
    """Return the cheaper of two programs; the first one if they cost the same.

    Only what more towers do not make cheaper counts: undivided operations and
    the bytes of exchanges.
    """
    return min(program, other, key=_cost_of)


def _cost_of(program: Program) -> float:
    """Return the cost of a program, in multiplications."""
    work = sum(map(work_of, _undivided(program)))
    sizes = TensorSizes(program, towers=1, rows=ASSUMED_LENGTH)
    moved = sum(sizes.bytes_of(e.result) for e in program.exchanges)
    return work + _WORK_PER_BYTE * moved


def _undivided(program: Program) -> Iterable[tf.Operation]:
    """Return the traced operations that are computed once, as on one device."""
    undivided = {
        id(operation.source): operation.source
        for operation in program.operations
        if operation.source is not None
        and "micro_batches" not in operation.axes
    }
    return undivided.values()


# ---- sparse and ragged rows --------------------------------------------------


def _sparse_indices(units: Units, own: Tensor, layout: SparseIndices) -> Value:
    """Return the value of the indices of a sparse tensor."""
    rows = units.found_rows(layout.unit, own)
    examples, rank = Sharded(0, units.of_batch), int(own.shape[1] or 0)
    return index_value(units.builder, own, rows, examples, rank)


def _sparse_shape(units: Units, own: Tensor, layout: SparseShape) -> Value:
    """Return the value of the dense shape of a sparse tensor."""
    rank = 1 + len(layout.sizes)
    # The sizes after the first are the same on all towers.
    rest = units.builder.op("Slice", [own, [1], [rank - 1]], (rank - 1,))
    rest = units.builder.exchange("first", rest)
    total = units.builder.size_vector([units.of_batch.total], SIZE_DTYPE)
    whole = units.builder.op("ConcatV2", [total, rest, 0], (rank,))
    known = np.array([units.of_batch.size, *sizes_of(layout.sizes)], object)
    return Value(REPLICATED, whole=whole, shape=(rank,), known=known)


def _row_splits(units: Units, own: Tensor, layout: RowSplits) -> Value:
    """Return the value of the row splits of a ragged tensor."""
    rows = Sharded(0, units.of_batch)
    return splits_value(units, own, rows, layout.unit)
