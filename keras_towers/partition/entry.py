"""Lays out a traced graph: given layouts of its inputs, whole results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.partition.builder import EVERYWHERE, SIZE_DTYPE, Builder
from keras_towers.partition.conversions import (
    CannotGather,
    Converter,
    LayoutOptions,
)
from keras_towers.partition.effects import is_variable
from keras_towers.partition.layout_pass import lay_out_graph
from keras_towers.partition.layouts import (
    REPLICATED,
    AllExamples,
    InputLayout,
    InShards,
    Mirrored,
    RaggedSplits,
    Replicated,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
    Unit,
    Value,
    local_shape,
    sizes_of,
)
from keras_towers.partition.nodes import Marks, Scope
from keras_towers.partition.program import (
    ColumnInput,
    Inputs,
    Program,
    Tensor,
    delay_operations,
    prune,
)
from keras_towers.partition.rules.control_flow import has_control_flow_v1
from keras_towers.partition.rules.mesh_columns import is_over_columns
from keras_towers.partition.rules.row_numbers import index_value
from keras_towers.partition.sizes import (
    EXAMPLES,
    ONE_MORE,
    UNKNOWN,
    Dimension,
    Size,
    symbol,
    symbol_name,
)
from keras_towers.partition.units import Units

_DEFAULTS = LayoutOptions()
_NOTHING = symbol("nothing")
# What adds up the terms of a gradient, or passes them on, and what scales them.
_ADDS = frozenset(("Add", "AddN", "AddV2", "Cast", "Identity", "IdentityN"))
_SCALES = frozenset(("Mul", "RealDiv"))


def partition_graph(
    graph: tf.Graph,
    layouts: Sequence[InputLayout],
    wanted: Sequence[tf.Tensor],
    gradients: Mapping[str, Sequence[InputLayout]] = MappingProxyType({}),
    updates: Mapping[str, str] = MappingProxyType({}),
    of_columns: Sequence[ColumnInput] = (),
    options: LayoutOptions = _DEFAULTS,
) -> Program:
    """Lay out a graph over towers.

    Args:
        graph: the trace of the one-device step.
        layouts: the layouts of its N inputs.
        wanted: the tensors of the graph that the program returns.
        gradients: the operations that return gradients, and components of
            gradients, to an optimizer, by name: how to lay out each of them.
        updates: the operations of optimizers' updates, as in ``Marks``.
        of_columns: what the last inputs are, which differ between columns.
        options: the options of the layout.
    """
    if has_control_flow_v1(graph):
        raise TowerError(
            "the step has a loop or a branch of TensorFlow 1 (Enter, Switch), "
            "such as one of an imported GraphDef, which towers cannot divide: "
            "import it in tf.compat.v1.wrap_function, and call that."
        )
    inputs = _inputs(graph, layouts, of_columns)
    units = _units(graph, layouts, inputs, options)
    of_gradients = itertools.chain(*gradients.values())
    shares = _variable_shares(units, [*layouts, *of_gradients])
    marks = Marks(gradients, _terms_of(graph, gradients), updates)
    converter = Converter(units, inputs.is_first, inputs.is_first_part, options)
    scope = Scope(converter, marks)
    values, sizes = _values(graph, layouts, inputs, units)
    copies = _copies(layouts, inputs.of_graph, values, scope)
    try:
        by_name = lay_out_graph(scope, graph, values)
    except CannotGather:
        # An operation without a rule takes a list of rows.
        undivided = dataclasses.replace(options, lists=False)
        given = graph, layouts, wanted, gradients, updates, of_columns
        return partition_graph(*given, undivided)
    results = [converter.assemble(by_name[tensor.name]) for tensor in wanted]
    inputs = dataclasses.replace(
        inputs, sizes=sizes, copies=copies, shares=shares
    )
    return _program(scope, inputs, results, by_name)


def _inputs(
    graph: tf.Graph,
    layouts: Sequence[InputLayout],
    of_columns: Sequence[ColumnInput],
) -> Inputs:
    """Return the inputs of a program, without those that a layout adds."""
    tensors = [
        _tensor(traced, layout)
        for traced, layout in zip(graph.inputs, layouts, strict=True)
    ]
    for tensor in tensors[len(tensors) - len(of_columns) :]:
        tensor.on_columns = True
    number = tf.TensorShape(())
    return Inputs(
        of_graph=tensors,
        start=Tensor(SIZE_DTYPE, number, on_towers=True),
        total=Tensor(SIZE_DTYPE, number, on_towers=False),
        is_first=Tensor(tf.bool, number, on_towers=True),
        is_first_part=Tensor(tf.bool, number, on_towers=True),
        sizes={},
        of_columns=of_columns,
    )


def _units(
    graph: tf.Graph,
    layouts: Sequence[InputLayout],
    inputs: Inputs,
    options: LayoutOptions,
) -> Units:
    """Return the units of a program, which know the number of examples."""
    builder = Builder(
        shard_axes=("towers",) if options.replicate_shards else EVERYWHERE
    )
    total = inputs.total
    size, count = _examples(builder, graph.inputs, inputs, layouts)
    units = Units(builder, Unit(size, count, inputs.start, total))
    units.sizes[symbol_name(EXAMPLES)] = total
    return units


def _program(
    scope: Scope,
    inputs: Inputs,
    results: Sequence[Tensor],
    by_name: Mapping[str, Value],
) -> Program:
    """Return the program of what was laid out, without what nobody needs."""
    operations, exchanges = prune(
        scope.builder.operations, scope.builder.exchanges, results
    )
    delay_operations(operations, exchanges, results)
    sources = {id(operation.source) for operation in operations}
    return Program(
        inputs,
        operations,
        exchanges,
        results,
        scope.graphs,
        {o: why for o, why in scope.computed_once.items() if id(o) in sources},
        by_name,
        scope.converter.replaced_sums,
    )


def _terms_of(graph: tf.Graph, gradients: Iterable[str]) -> dict[str, str]:
    """Return which gradient an operation is for, if it adds up terms of one.

    Args:
        graph: the graph.
        gradients: the operations that return gradients, by name.
    """
    found: dict[str, str] = {}

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
                is_linear = is_linear or is_over_columns(term)
                users = {user.name for user in tensor.consumers()} - {name}
                if is_linear and all(found.get(u) == of for u in users):
                    found[term.name] = of
                    waiting += term.inputs
    # A factor may be a sum of its own.
    scales = [n for n in found if type_of(n) in _SCALES]
    return {n: found[n] for n in found.keys() - scales}


def _tensor(traced: tf.Tensor, layout: InputLayout) -> Tensor:
    """Return the tensor of an input."""
    on_towers = not isinstance(layout, (InShards, Mirrored, Replicated))
    handle = None
    if traced.dtype == tf.resource and is_variable(traced):
        handle = compat.get_resource_handle_data(traced)
    if isinstance(layout, (RowSplits, SparseIndices)):
        layout = Sharded(0)
    if isinstance(layout, InShards):
        layout = REPLICATED
    shape = local_shape(traced.shape, layout)
    return Tensor(traced.dtype, shape, on_towers, handle=handle)


def _examples(
    builder: Builder,
    traced: Sequence[tf.Tensor],
    inputs: Inputs,
    layouts: Sequence[InputLayout],
) -> tuple[Dimension, Tensor]:
    """Return the global and the local number of examples.

    Without rows in the inputs, everything is computed once, and the number of
    examples of a tower does not matter.
    """
    count = inputs.total
    if any(isinstance(layout, AllExamples) for layout in layouts):
        # No size is a multiple of what is not there.
        return _NOTHING, count
    for tensor, own, layout in zip(
        traced, inputs.of_graph, layouts, strict=True
    ):
        if isinstance(layout, Sharded) and layout.unit is None:
            size: Dimension | None = tensor.shape[layout.axis]
            size = EXAMPLES if size is None else size // layout.rows_per_unit
            return size, _number_of_units(builder, own, layout)
        if isinstance(layout, RowSplits):
            ends = builder.axis_size(own)
            count = builder.compute_size("Sub", ends, 1)
        elif isinstance(layout, SparseShape):
            count = builder.vector_entry(own, 0)
    return EXAMPLES, count


def _number_of_units(
    builder: Builder, tensor: Tensor, layout: Sharded
) -> Tensor:
    """Return the local number of units of sharded rows."""
    rows = builder.axis_size(tensor, layout.axis)
    if layout.rows_per_unit == 1:
        return rows
    return builder.compute_size("FloorDiv", rows, layout.rows_per_unit)


def _values(
    graph: tf.Graph,
    layouts: Sequence[InputLayout],
    inputs: Inputs,
    units: Units,
) -> tuple[list[Value], dict[str, Tensor]]:
    """Return the values of inputs, and the sizes that their shapes name."""
    sizes: dict[str, Tensor] = {}
    values = [
        _value(index, traced, tensor, layout, units, sizes)
        for index, (traced, tensor, layout) in enumerate(
            zip(graph.inputs, inputs.of_graph, layouts, strict=True)
        )
    ]
    first = len(values) - len(inputs.of_columns)
    for value, of_column in zip(values[first:], inputs.of_columns, strict=True):
        if of_column.kind == "start":
            # Of a vector with it, the other entries are still known.
            value.known = np.array(UNKNOWN, object)
    units.sizes.update(sizes)
    return values, sizes


def _value(
    index: int,
    traced: tf.Tensor,
    tensor: Tensor,
    layout: InputLayout,
    units: Units,
    sizes: dict[str, Tensor],
) -> Value:
    """Return the value of an input, with symbols for unknown sizes."""
    if isinstance(layout, SparseIndices):
        return _sparse_indices(units, tensor, layout)
    if isinstance(layout, SparseShape):
        return _sparse_shape(units, tensor, layout)
    if isinstance(layout, RowSplits):
        return _row_splits(units, tensor, layout)
    if isinstance(layout, Sharded):
        unit: Any = units.of_batch
        if layout.unit is not None:
            count = _number_of_units(units.builder, tensor, layout)
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
                tensor.on_towers or isinstance(layout, AllExamples)
            ):
                shape[axis] = symbol(name)
                sizes[name] = Tensor(
                    SIZE_DTYPE, tf.TensorShape(()), on_towers=False
                )
        shape = tuple(shape)
    if isinstance(layout, (InShards, Mirrored, Replicated)):
        return Value(REPLICATED, whole=tensor, shape=shape)
    return Value(layout, local=tensor, shape=shape)


def _copies(
    layouts: Sequence[InputLayout],
    tensors: Sequence[Tensor],
    values: Sequence[Value],
    scope: Scope,
) -> dict[int, Tensor]:
    """Return the copies or shards that towers have of inputs, by the index."""
    copies: dict[int, Tensor] = {}
    for index, layout in enumerate(layouts):
        common = tensors[index]
        if isinstance(layout, Mirrored):
            copy = dataclasses.replace(common, on_towers=True, of_batch=False)
            copies[index] = values[index].local = copy
            if copy.handle is not None:
                scope.variables.resources.add_copies(common, copy)
        elif isinstance(layout, InShards):
            handle = _handle_of_shards(common.handle, layout)
            copies[index] = dataclasses.replace(
                common, on_towers=True, handle=handle, of_batch=False
            )
            rows = scope.units.rows_in(layout)
            scope.variables.resources.add_copies(common, copies[index], rows)
    return copies


# ---- variables in shards -----------------------------------------------------


def _variable_shares(
    units: Units, layouts: Iterable[InputLayout]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Add the units of variables in shards; return the shares of towers."""
    shares: dict[int, tuple[Tensor, Tensor]] = {}
    for layout in layouts:
        if not isinstance(layout, InShards) or layout.size in shares:
            continue
        number = tf.TensorShape(())
        count, start = (
            Tensor(SIZE_DTYPE, number, on_towers=True, of_batch=False)
            for _ in range(2)
        )
        shares[layout.size] = count, start
        if layout.rows is not None:
            count = units.builder.constant(layout.rows, SIZE_DTYPE)
        units.of_variables[layout.size] = Unit(
            layout.size,
            count,
            start,
            units.builder.constant(layout.size, SIZE_DTYPE),
            of_variables=True,
            local_size=layout.rows,
        )
    return shares


def _handle_of_shards(whole: Any, layout: InShards) -> Any:
    """Return the handle data of a tower's rows of a variable."""
    data = type(whole)()
    data.CopyFrom(whole)
    rows = -1 if layout.rows is None else layout.rows
    data.shape_and_type[0].shape.dim[layout.axis].size = rows
    return data


# ---- sparse and ragged rows --------------------------------------------------


def _sparse_indices(units: Units, own: Tensor, layout: SparseIndices) -> Value:
    """Return the value of the indices of a sparse tensor."""
    unit = units.data_dependent_unit(layout.unit, units.builder.axis_size(own))
    rows, examples = Sharded(0, unit), Sharded(0, units.of_batch)
    return index_value(
        units.builder, own, rows, examples, int(own.shape[1] or 0)
    )


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
    last = units.builder.op("Max", [own, [0]], ())
    unit = units.data_dependent_unit(
        layout.unit, units.builder.cast(last, SIZE_DTYPE)
    )
    ends = units.builder.op("Slice", [own, [1], [-1]], (None,))
    start = units.builder.cast(unit.start, own.dtype)
    ends = units.builder.op("AddV2", [ends, start], (None,))
    ends = units.builder.exchange("gather", ends, 0, [units.of_batch.size])
    whole = units.builder.op("ConcatV2", [[0], ends, 0], (None,))
    units.sizes[symbol_name(ONE_MORE)] = units.builder.op(
        "AddV2", [units.of_batch.total, 1], ()
    )
    examples = units.of_batch.size
    size = ONE_MORE if isinstance(examples, Size) else examples + 1
    splits = RaggedSplits(own, unit)
    return Value(REPLICATED, whole=whole, shape=(size,), meaning=splits)
