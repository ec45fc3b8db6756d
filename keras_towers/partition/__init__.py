"""One device's step, laid out over towers.

Knows no strategies, no towers and no Keras: it takes a traced graph, and says
what each of several computes of it, what is computed once, and what they
exchange in between.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import rules
from keras_towers.partition.builder import Builder
from keras_towers.partition.conversions import SIZE, CannotGather, local_shape
from keras_towers.partition.delay import delayed
from keras_towers.partition.effects import is_variable
from keras_towers.partition.layouts import (
    REPLICATED,
    InputLayout,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
    Unit,
    Value,
)
from keras_towers.partition.partitioner import Partitioner, Updating
from keras_towers.partition.program import Inputs, Program, Tensor, needed
from keras_towers.partition.rules import ragged, sparse
from keras_towers.partition.sizes import EXAMPLES, name_of, symbol

__all__ = ["Program", "Updating", "partitioned", "rules"]

NONE: Mapping[str, Updating] = {}


def partitioned(
    graph: Any,
    layouts: Sequence[InputLayout],
    wanted: Sequence[Any],
    updates: Mapping[str, Updating] = NONE,
    ranks: bool = False,
    mirrored: Sequence[bool] | None = None,
    xla: bool = False,
) -> Program:
    """Lay out a graph over towers.

    Args:
        graph: the trace of what one device does.
        layouts: those of its N inputs.
        wanted: tensors of the graph that are to be known to all.
        updates: the operations that stand for updates of an optimizer, by name.
        ranks: whether several processes run the program.
        mirrored: for each of the N inputs: whether it is the handle of a
            variable of which each tower has its own copy, and all have the
            same; None: there are none.
        xla: whether XLA compiles what towers compute.
    """
    program, _ = laid_out(graph, layouts, wanted, updates, ranks, mirrored, xla)
    return program


def laid_out(
    graph: Any,
    layouts: Sequence[InputLayout],
    wanted: Sequence[Any],
    updates: Mapping[str, Updating] = NONE,
    ranks: bool = False,
    mirrored: Sequence[bool] | None = None,
    xla: bool = False,
) -> tuple[Program, dict[str, Value]]:
    """Lay out a graph as ``partitioned``; also return what it knows of tensors.

    Returns:
        The program, and the values of the graph's tensors by their names.
    """
    lay_out = functools.partial(
        _attempt, graph, layouts, wanted, updates, ranks, mirrored, xla
    )
    try:
        return lay_out(lists=True)
    except CannotGather:
        # A list of rows meets what has no rule: then lists are not divided.
        return lay_out(lists=False)


def _attempt(
    graph: Any,
    layouts: Sequence[InputLayout],
    wanted: Sequence[Any],
    updates: Mapping[str, Updating],
    ranks: bool,
    mirrored: Sequence[bool] | None,
    xla: bool,
    lists: bool,
) -> tuple[Program, dict[str, Value]]:
    builder = Builder()
    number = tf.TensorShape(())
    start = Tensor(SIZE, number, on_towers=True)
    total = Tensor(SIZE, number, on_towers=False)
    is_first = Tensor(tf.bool, number, on_towers=True)
    sizes: dict[str, Tensor] = {}
    given = [
        Tensor(
            t.dtype,
            local_shape(t.shape, layout),
            layout != REPLICATED,
            handle=_handle(t),
        )
        for t, layout in zip(graph.inputs, layouts, strict=True)
    ]
    count = _examples_of_tower(builder, given, layouts, total)
    unit = Unit(_examples(graph, layouts), count, start, total)
    symbols = {name_of(EXAMPLES): total, **sizes}
    partition = Partitioner(unit, is_first, symbols, builder, lists, ranks, xla)
    copies = {
        index: dataclasses.replace(own, on_towers=True)
        for index, own in enumerate(given)
        if mirrored is not None and mirrored[index]
    }
    partition.order.copies = {own: given[k] for k, own in copies.items()}
    values = [
        _value(index, tensor, own, layout, partition, sizes)
        for index, (tensor, own, layout) in enumerate(
            zip(graph.inputs, given, layouts, strict=True)
        )
    ]
    for index, own in copies.items():
        values[index].local = own
    partition.sizes.update(sizes)
    partition.updating = updates
    by_name = partition.run(graph, values)
    results = [partition.whole(by_name[tensor.name]) for tensor in wanted]
    given_to_updates = [t for u in partition.updates for t in u.given]
    operations, exchanges = needed(
        builder.operations, builder.exchanges, [*results, *given_to_updates]
    )
    delayed(operations, exchanges, partition.updates, results)
    sources = {id(operation.source) for operation in operations}
    program = Program(
        Inputs(given, start, total, is_first, sizes, copies),
        operations,
        exchanges,
        partition.updates,
        results,
        partition.graphs,
        [o for o in partition.once if id(o) in sources],
    )
    return program, by_name


def _handle(tensor: Any) -> Any:
    """What TensorFlow says of the variable of a handle, if it is one."""
    is_handle = tensor.dtype == tf.resource and is_variable(tensor)
    return compat.get_resource_handle_data(tensor) if is_handle else None


def _examples(graph: Any, layouts: Sequence[InputLayout]) -> Any:
    """The number of examples, if the trace knows it, or its symbol."""
    for tensor, layout in zip(graph.inputs, layouts, strict=True):
        if isinstance(layout, Sharded) and layout.unit is None:
            size = tensor.shape[layout.axis]
            return EXAMPLES if size is None else size // layout.count
    return EXAMPLES


def _value(
    index: int,
    tensor: Any,
    own: Tensor,
    layout: InputLayout,
    partition: Partitioner,
    sizes: dict[str, Tensor],
) -> Value:
    """What is known of an input, of which some sizes are symbols."""
    if isinstance(layout, SparseIndices):
        return sparse.indices(partition, own, layout)
    if isinstance(layout, RowSplits):
        return ragged.splits(partition, own, layout)
    if isinstance(layout, SparseShape):
        return sparse.shape(partition, own, layout)
    if isinstance(layout, Sharded):
        unit: Any = partition.unit
        if layout.unit is not None:
            count = _count(partition.builder, own, layout)
            unit = partition.found_unit(layout.unit, count)
        layout = dataclasses.replace(layout, unit=unit)
    shape: Any = None
    if tensor.shape.rank is not None:
        shape = list(tensor.shape)
        for axis, size in enumerate(shape):
            name = f"{index}.{axis}"
            if isinstance(layout, Sharded) and axis == layout.axis:
                shape[axis] = layout.size
            elif size is None and own.on_towers:
                shape[axis] = symbol(name)
                sizes[name] = Tensor(SIZE, tf.TensorShape(()), on_towers=False)
        shape = tuple(shape)
    if layout == REPLICATED:
        return Value(layout, whole=own, shape=shape)
    return Value(layout, local=own, shape=shape)


def _examples_of_tower(
    builder: Builder,
    given: Sequence[Tensor],
    layouts: Sequence[InputLayout],
    total: Tensor,
) -> Tensor:
    """The number of examples of a tower."""
    for own, layout in zip(given, layouts, strict=True):
        if isinstance(layout, Sharded) and layout.unit is None:
            return _count(builder, own, layout)
        if isinstance(layout, RowSplits):
            ends = _count(builder, own, Sharded(0))
            one = builder.constant(1, SIZE)
            return builder.op("Sub", [ends, one], (), is_repeated=True)
        if isinstance(layout, SparseShape):
            first = [builder.constant([end], tf.int32) for end in (0, 1, 1)]
            return builder.op(
                "StridedSlice",
                [own, *first],
                (),
                is_repeated=True,
                shrink_axis_mask=1,
            )
    # Of data without rows all is done once.
    return total


def _count(builder: Builder, own: Tensor, layout: Sharded) -> Tensor:
    """The number of units of a tower, from its rows."""
    shape = builder.op("Shape", [own], is_repeated=True, out_type=SIZE)
    ends = [layout.axis, layout.axis + 1, 1]
    count = builder.op(
        "StridedSlice",
        [shape, *(builder.constant([end], tf.int32) for end in ends)],
        (),
        is_repeated=True,
        shrink_axis_mask=1,
    )
    if layout.count == 1:
        return count
    each = builder.constant(layout.count, SIZE)
    return builder.op("FloorDiv", [count, each], (), is_repeated=True)
