"""Lays out a traced graph whose inputs towers have rows of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.partition.builder import SIZE
from keras_towers.partition.called_functions import has_control_flow_v1
from keras_towers.partition.conversions import CannotGather, Options
from keras_towers.partition.effects import is_variable
from keras_towers.partition.layouts import (
    REPLICATED,
    InputLayout,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
    Splits,
    Unit,
    Value,
    local_shape,
    sizes_of,
)
from keras_towers.partition.partitioner import Partitioner, UpdateInfo
from keras_towers.partition.program import (
    Inputs,
    Program,
    Tensor,
    delayed,
    needed,
)
from keras_towers.partition.rules.places import indices_of
from keras_towers.partition.sizes import (
    EXAMPLES,
    ONE_MORE,
    UNKNOWN,
    Size,
    name_of,
    symbol,
)


def partition_graph(*arguments: Any, **options: Any) -> Program:
    """Lay out a graph as ``lay_out`` does; return the program only."""
    program, _ = lay_out(*arguments, **options)
    return program


def lay_out(
    graph: Any,
    layouts: Sequence[InputLayout],
    wanted: Sequence[Any],
    updates: Mapping[str, UpdateInfo] = MappingProxyType({}),
    mirrored: Sequence[bool] | None = None,
    **options: Any,
) -> tuple[Program, dict[str, Value]]:
    """Lay out a graph over towers.

    Args:
        graph: the trace of what one device does.
        layouts: how its N inputs are laid out.
        wanted: the tensors of the graph whose wholes the program returns.
        updates: the operations that stand for updates of an optimizer, by name.
        mirrored: for each of the N inputs: whether it is the handle of a
            variable of which each tower has its own copy, and all have the
            same; None: there are none.
        **options: those of ``Options``.

    Returns:
        The program, and what is known of the graph's tensors by their names.
    """
    if has_control_flow_v1(graph):
        raise TowerError(
            "the step has a loop or a branch of TensorFlow 1 (Enter, Switch), "
            "such as one of an imported GraphDef, which towers cannot divide: "
            "import it in tf.compat.v1.wrap_function, and call that."
        )
    given = graph, layouts, wanted, updates, mirrored or [False] * len(layouts)
    try:
        return _laid_out(*given, Options(**options))
    except CannotGather:
        # An operation without a rule needs a list of rows.
        return _laid_out(*given, Options(**options, lists=False))


def _laid_out(
    graph: Any,
    layouts: Sequence[InputLayout],
    wanted: Sequence[Any],
    updates: Mapping[str, UpdateInfo],
    mirrored: Sequence[bool],
    options: Options,
) -> tuple[Program, dict[str, Value]]:
    number = tf.TensorShape(())
    start = Tensor(SIZE, number, on_towers=True)
    total = Tensor(SIZE, number, on_towers=False)
    is_first = Tensor(tf.bool, number, on_towers=True)
    tensors = [
        Tensor(
            t.dtype, _shape(t, layout), layout != REPLICATED, handle=_handle(t)
        )
        for t, layout in zip(graph.inputs, layouts, strict=True)
    ]
    # Of data without rows all is done once: whatever a tower has.
    unit = Unit(EXAMPLES, total, start, total)
    partition = Partitioner(unit, is_first, options)
    size, count = _examples(partition, graph.inputs, tensors, layouts)
    partition.unit = dataclasses.replace(unit, size=size, count=count)
    partition.sizes[name_of(EXAMPLES)] = total
    partition.update_infos = updates
    sizes: dict[str, Tensor] = {}
    values = [
        _value(index, traced, tensor, layout, partition, sizes)
        for index, (traced, tensor, layout) in enumerate(
            zip(graph.inputs, tensors, layouts, strict=True)
        )
    ]
    partition.sizes.update(sizes)
    copies: dict[int, Tensor] = {}
    for index, is_mirrored in enumerate(mirrored):
        if is_mirrored:
            copy = dataclasses.replace(tensors[index], on_towers=True)
            copies[index] = values[index].local = copy
            partition.order.copies[copy] = tensors[index]
    by_name = partition.run(graph, values)
    results = [partition.whole(by_name[tensor.name]) for tensor in wanted]
    ends = [*results, *(t for u in partition.updates for t in u.given)]
    operations, exchanges = needed(
        partition.operations, partition.exchanges, ends
    )
    delayed(operations, exchanges, partition.updates, results)
    sources = {id(operation.source) for operation in operations}
    program = Program(
        Inputs(tensors, start, total, is_first, sizes, copies),
        operations,
        exchanges,
        partition.updates,
        results,
        partition.graphs,
        [o for o in partition.once if id(o) in sources],
        partition.has_gathered,
    )
    return program, by_name


def _handle(tensor: Any) -> Any:
    """What TensorFlow says of the variable of a handle, if it is one."""
    is_handle = tensor.dtype == tf.resource and is_variable(tensor)
    return compat.get_resource_handle_data(tensor) if is_handle else None


def _shape(tensor: Any, layout: InputLayout) -> tf.TensorShape:
    """The shape of what a tower is given."""
    if isinstance(layout, (RowSplits, SparseIndices)):
        return local_shape(tensor.shape, Sharded(0))
    return local_shape(tensor.shape, layout)


def _examples(
    partition: Partitioner,
    traced: Sequence[Any],
    tensors: Sequence[Tensor],
    layouts: Sequence[InputLayout],
) -> tuple[Any, Tensor]:
    """How many examples one device has, and a tower."""
    for tensor, own, layout in zip(traced, tensors, layouts, strict=True):
        if isinstance(layout, Sharded) and layout.unit is None:
            size = tensor.shape[layout.axis]
            count = _units(partition, own, layout)
            return EXAMPLES if size is None else size // layout.count, count
    for own, layout in zip(tensors, layouts, strict=True):
        if isinstance(layout, RowSplits):
            ends = partition.length(own)
            return EXAMPLES, partition.calculated("Sub", ends, 1)
        if isinstance(layout, SparseShape):
            return EXAMPLES, partition.entry(own, 0)
    return EXAMPLES, partition.unit.total


def _units(partition: Partitioner, tensor: Tensor, layout: Sharded) -> Tensor:
    """The number of units of a tower, from its rows."""
    rows = partition.length(tensor, layout.axis)
    if layout.count == 1:
        return rows
    return partition.calculated("FloorDiv", rows, layout.count)


def _value(
    index: int,
    traced: Any,
    tensor: Tensor,
    layout: InputLayout,
    partition: Partitioner,
    sizes: dict[str, Tensor],
) -> Value:
    """What is known of an input, of which some sizes are symbols."""
    if isinstance(layout, SparseIndices):
        return _sparse_indices(partition, tensor, layout)
    if isinstance(layout, SparseShape):
        return _sparse_shape(partition, tensor, layout)
    if isinstance(layout, RowSplits):
        return _row_splits(partition, tensor, layout)
    if isinstance(layout, Sharded):
        unit: Any = partition.unit
        if layout.unit is not None:
            count = _units(partition, tensor, layout)
            unit = partition.data_dependent_unit(layout.unit, count)
        layout = dataclasses.replace(layout, unit=unit)
    shape: Any = None
    if traced.shape.rank is not None:
        shape = list(sizes_of(traced.shape))
        for axis, size in enumerate(shape):
            name = f"{index}.{axis}"
            if isinstance(layout, Sharded) and axis == layout.axis:
                shape[axis] = layout.size
            elif size is UNKNOWN and tensor.on_towers:
                shape[axis] = symbol(name)
                sizes[name] = Tensor(SIZE, tf.TensorShape(()), on_towers=False)
        shape = tuple(shape)
    if layout == REPLICATED:
        return Value(layout, whole=tensor, shape=shape)
    return Value(layout, local=tensor, shape=shape)


# ---- sparse and ragged rows --------------------------------------------------


def _sparse_indices(
    partition: Partitioner, own: Tensor, layout: SparseIndices
) -> Value:
    """Where sparse rows have entries."""
    unit = partition.data_dependent_unit(layout.unit, partition.length(own))
    rows, of = Sharded(0, unit), Sharded(0, partition.unit)
    return indices_of(partition, own, rows, of, int(own.shape[1] or 0))


def _sparse_shape(
    partition: Partitioner, own: Tensor, layout: SparseShape
) -> Value:
    """The shape of sparse rows."""
    rank = 1 + len(layout.sizes)
    # Behind the first, all towers have the same sizes.
    behind = partition.op("Slice", [own, [1], [rank - 1]], (rank - 1,))
    behind = partition.exchange("first", behind)
    ahead = partition.vector([partition.unit.total], SIZE)
    whole = partition.op("ConcatV2", [ahead, behind, 0], (rank,))
    known = np.array([partition.unit.size, *sizes_of(layout.sizes)], object)
    return Value(REPLICATED, whole=whole, shape=(rank,), known=known)


def _row_splits(
    partition: Partitioner, own: Tensor, layout: RowSplits
) -> Value:
    """Where ragged rows begin and end."""
    last = partition.op("Max", [own, [0]], ())
    unit = partition.data_dependent_unit(
        layout.unit, partition.cast(last, SIZE)
    )
    ends = partition.op("Slice", [own, [1], [-1]], (None,))
    start = partition.cast(unit.start, own.dtype)
    ends = partition.op("AddV2", [ends, start], (None,))
    ends = partition.exchange("gather", ends, 0, partition.unit.size)
    whole = partition.op("ConcatV2", [[0], ends, 0], (None,))
    partition.sizes[name_of(ONE_MORE)] = partition.op(
        "AddV2", [partition.unit.total, 1], ()
    )
    examples = partition.unit.size
    size = ONE_MORE if isinstance(examples, Size) else examples + 1
    splits = Splits(own, unit)
    return Value(REPLICATED, whole=whole, shape=(size,), numbers=splits)
