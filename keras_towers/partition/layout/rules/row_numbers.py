"""Row numbers: integers that refer to rows.

A global row number is the tower's own number plus the number of rows of all
earlier towers. An operation that moves row numbers is applied twice: to the
global numbers, as to any integers, and to the local ones, by which a tower
indexes its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.builder import Builder, static
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    DataDependentUnit,
    Sharded,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import asserted, require, unless_none
from keras_towers.partition.ir.registry import facts_of, operation
from keras_towers.partition.ir.sizes import Dimension
from keras_towers.partition.ir.values import (
    BelowLimit,
    RowNumbers,
    Value,
    Values,
    known_ints,
)
from keras_towers.partition.layout.layout_pass import apply_rules
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.spans import Span, spans
from keras_towers.partition.layout.units import Units

_Changes: TypeAlias = dict[str, Any]


# ---- sources -----------------------------------------------------------------


def _where(node: Node, mask: Value) -> Values:
    """Find the true entries among each tower's rows."""
    layout, local = mask.as_rows()
    require(not layout.axis and layout.blocks == 1)
    (indices,) = node.copy([local])
    rows = node.units.found_rows(skip_reshapes(local), indices)
    return [index_value(node.builder, indices, rows, layout, mask.rank)]


def index_value(
    builder: Builder, own: Tensor, rows: Sharded, of: Sharded, rank: int
) -> Value:
    """Return the value of indices of entries, such as of a sparse tensor.

    Args:
        builder: adds operations.
        own: the local indices, counted from the first row of the tower.
        rows: the layout of the indices.
        of: the layout of the indexed tensor, along axis 0.
        rank: the rank of the indexed tensor.
    """
    start = builder.scaled_size(of.rows, of.unit.start)
    offset = builder.size_at_axis(0, rank, start)
    numbers = builder.op("AddV2", [own, offset], own.shape)
    row_numbers = RowNumbers(
        own, rows, of.unit, of.rows, is_first_column=rank > 1
    )
    return Value(rows, numbers, shape=(rows.size, rank), meaning=row_numbers)


def entry_numbers(
    builder: Builder, own: Tensor, layout: Sharded, of: Sharded
) -> Value:
    """Return the value of the row number of each entry.

    Args:
        builder: adds operations.
        own: the local row numbers.
        layout: their layout.
        of: the layout of the numbered rows, along axis 0.
    """
    start = builder.scaled_size(of.rows, of.unit.start)
    numbers = builder.op(
        "AddV2", [own, builder.cast(start, own.dtype)], (None,)
    )
    meaning = RowNumbers(own, layout, of.unit, of.rows)
    return Value(layout, numbers, shape=(layout.size,), meaning=meaning)


def _split_texts(node: Node, texts: Value, separator: Value) -> Values:
    """Split each tower's texts into words."""
    layout, own = texts.as_rows()
    operands = [own, node.converter.replicate(separator)]
    return sparse_rows(node, layout, operands)


def _cross_features(node: Node, *inputs: Value) -> Values:
    """Cross the dense or ragged features of each example."""
    require(not node.attr("N"))
    rows = [value for value in inputs if value.rank == 2]
    layout = unless_none(rows[0].sharded)
    operands = [
        node.converter.shard(value, layout)
        if value in rows
        else node.converter.replicate(value)
        for value in inputs
    ]
    return sparse_rows(node, layout, operands)


def sparse_rows(
    node: Node, layout: Sharded, operands: Sequence[Tensor]
) -> Values:
    """Return a sparse tensor, given the entries that towers find in their rows.

    Args:
        node: finds it.
        layout: the layout of the rows, along axis 0.
        operands: the local inputs.
    """
    require(layout == Sharded(0, layout.unit, rows=layout.rows))
    shapes = [tf.TensorShape(sizes) for sizes in ([None, 2], [None], [2])]
    return sparse_values(node, layout, *node.copy(operands, shapes))


def sparse_values(
    node: Node, layout: Sharded, indices: Tensor, entries: Tensor, size: Tensor
) -> list[Value]:
    """Return the values of a sparse tensor, given its parts on each tower."""
    builder, units = node.builder, node.units
    rows = units.found_rows(("found", entries), entries)
    most = node.converter.reduce_over_towers(
        "Max", builder.vector_entry(size, 1), ()
    )
    length = units.new_size(asserted(most.whole))
    known = np.array([layout.size, length], object)
    whole = units.known_tensor(known, node.output_dtype(2))
    return [
        index_value(builder, indices, rows, layout, rank=2),
        Value(rows, entries, shape=(rows.size,)),
        Value(REPLICATED, whole=asserted(whole), known=known),
    ]


def note_range(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that a range numbers all rows of a unit, or every n-th of them."""
    builder, units = node.builder, node.units
    first, last, step = (value.number for value in inputs)
    # If it is a coincidence, these are the numbers of rows all the same.
    rows = units.find_rows(0, last, may_coincide=True)
    if first != 0 or rows is None or not isinstance(step, int) or step < 1:
        return
    dtype = node.output_dtype(0)
    if rows.rows % step or not dtype.is_integer:
        return
    count = builder.cast(units.local_rows(rows), dtype)
    numbers = builder.op("Range", [0, count, step], (None,))
    layout = Sharded(0, rows.unit, rows=rows.rows // step)
    outputs[0].meaning = RowNumbers(
        numbers, layout, rows.unit, rows.rows, step, are_all=step == 1
    )
    outputs[0].shape = (layout.size,)


def _dynamic_partition(node: Node, values: Value, parts: Value) -> Values:
    """Partition the rows of each tower."""
    layout, own_parts = parts.as_rows()
    require(not layout.axis and layout.blocks == 1)
    whole = node.converter.shard(values, layout)
    trailing = values.sizes[parts.rank :]
    shape = static((None, *trailing))
    parts_of_rows = node.copy([whole, own_parts], [shape] * node.num_outputs)
    results = []
    for index, local in enumerate(parts_of_rows):
        rows = node.units.found_rows((skip_reshapes(own_parts), index), local)
        results.append(Value(rows, local, shape=(rows.size, *trailing)))
    return results


# ---- limits ------------------------------------------------------------------


def note_limits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that indices are less than an axis's size, and zeros less than 1."""
    limit: Dimension | None = 1
    if node.type != "ZerosLike":
        axis = -1 if node.type == "TopKV2" else known_ints(inputs[1])[0]
        limit = (inputs[0].shape or (None,))[axis]
    is_integer = node.output_dtype(len(outputs) - 1).is_integer
    if is_integer and isinstance(limit, int):
        outputs[-1].meaning = BelowLimit(limit)


def _is_below(value: Value, limit: int) -> bool:
    """Whether integers are at least 0 and less than a limit."""
    if isinstance(value.meaning, BelowLimit):
        return value.meaning.limit <= limit
    return all(0 <= entry < limit for entry in known_ints(value))


# ---- derived row numbers -----------------------------------------------------


def note_moved(
    node: Node, inputs: Values, outputs: Values, keeps_all: bool = True
) -> None:
    """Note that an operation moves row numbers, or integers with a limit."""
    if isinstance(inputs[0].meaning, BelowLimit):
        for output in outputs:
            output.meaning = inputs[0].meaning if _is_exact(node, 0) else None

    def changes(numbers: RowNumbers, at: int) -> _Changes | None:
        if at or (node.type == "GatherV2" and known_ints(inputs[2]) != [0]):
            return None
        if not numbers.is_first_column or node.type == "Cast":
            return {}
        if node.type != "StridedSlice":
            return None
        ends = [end.entries for end in inputs[1:]]
        *others, last = spans(node, inputs[0].sizes, *ends)
        if last != Span(len(others), 0, 1, dropped=True):
            return None
        is_whole = all(span.is_whole for span in others)
        return {"is_first_column": False, "are_all": is_whole}

    _note_derived(node, inputs, outputs, changes, keeps_all)


note_taken = functools.partial(note_moved, keeps_all=False)
"""As ``note_moved``, but some of the row numbers may be left out."""


def note_joined(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that row numbers become the first column of a matrix."""

    def changes(numbers: RowNumbers, at: int) -> _Changes | None:
        if at or numbers.is_first_column or not _becomes_column(node, inputs):
            return None
        return {"is_first_column": True}

    _note_derived(node, inputs, outputs, changes, keeps_all=False)


def note_calculated(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that arithmetic turns row numbers into those of other rows."""

    def changes(numbers: RowNumbers, at: int) -> _Changes | None:
        if numbers.is_first_column or (at and node.type == "FloorDiv"):
            return None
        return _arithmetic_changes(node, numbers, inputs[1 - at])

    keeps_all = node.type in ("FloorDiv", "Maximum")
    _note_derived(node, inputs, outputs, changes, keeps_all)


def _note_derived(
    node: Node,
    inputs: Values,
    outputs: Values,
    changes: Callable[[RowNumbers, int], _Changes | None],
    keeps_all: bool,
) -> None:
    """Apply an operation also to the tower-local row numbers.

    Args:
        node: the operation.
        inputs: the values of its inputs.
        outputs: the values of its outputs.
        changes: returns the attributes of row numbers that differ after it,
            given those and the index of the input; None: it gives no others.
        keeps_all: whether it leaves out no row number, or all.
    """
    for at, value in enumerate(inputs):
        before = value.row_numbers
        if before is None or not _is_exact(node, at):
            continue
        changed = changes(before, at)
        if changed is None:
            continue
        keeps = changed.get("are_all", keeps_all)
        changed["are_all"] = before.are_all and keeps
        numbered = list(inputs)
        numbered[at] = Value(before.layout, before.local, shape=value.shape)
        results = _lay_out_locally(node, numbered)
        for moved, output in zip(results, outputs, strict=False):
            if moved.sharded is not None and moved.local is not None:
                output.meaning = dataclasses.replace(
                    before, local=moved.local, layout=moved.sharded, **changed
                )
        return


def _lay_out_locally(node: Node, inputs: Values) -> Values:
    """Lay out an operation on local row numbers.

    An exchange would mix numbers that count from the first rows of different
    towers.
    """
    builder = node.builder
    exchanges = len(builder.exchanges)
    outputs = apply_rules(node, inputs)
    require(len(builder.exchanges) == exchanges)
    return outputs


def _is_exact(node: Node, at: int) -> bool:
    """Whether the dtypes can represent every row number."""
    return all(
        dtype.is_integer and dtype.size >= 4
        for dtype in (node.dtype(at), node.output_dtype(0))
    )


def _becomes_column(node: Node, inputs: Values) -> bool:
    """Whether an operation makes its first input a matrix's first column."""
    rank, is_pack = node.shapes[0].rank or 0, node.type == "Pack"
    axis = node.attr("axis") if is_pack else known_ints(inputs[-1])[0]
    if rank < 2 or axis % rank != rank - 1:
        return False
    return is_pack or (inputs[0].shape or ())[-1:] == (1,)


def _arithmetic_changes(
    node: Node, row_numbers: RowNumbers, other: Value
) -> _Changes | None:
    """Return the attributes that an arithmetic operation changes."""
    if node.type in ("AddV2", "Add"):
        return {"grain": 1} if _is_below(other, row_numbers.grain) else None
    if node.type == "Maximum":
        return {} if _is_below(other, 1) else None
    by, *more = known_ints(other)
    if more or by < 1:
        return None
    rows, grain = row_numbers.rows, row_numbers.grain
    if node.type == "Mul":
        return {"rows": rows * by, "grain": grain * by}
    if rows % by:
        return None
    return {"rows": rows // by, "grain": 1 if grain % by else grain // by}


# ---- tf.repeat ---------------------------------------------------------------

# TensorFlow computes the row of each entry of a ragged tensor by ``tf.repeat``.
#
# ``tf.repeat`` in a trace: each entry is tiled to the largest length, and a
# mask keeps the copies up to its length. A pattern is the type of an operation,
# then one item per input: a nested pattern, a name to bind, a constant, or None
# for anything.
_MOST = ("Maximum", None, ("Max", "all_lengths", 0))
_LENGTHS = ("BroadcastTo", ("Cast", "lengths"), None)
_TILED = ("Tile", ("ExpandDims", "entries", 1), ("Pack", 1, "most"))
_ENDS = ("Cast", ("ExpandDims", "all_lengths", -1))
_MASK = ("Less", ("Range", 0, "most", 1), _ENDS)
_PLACES = ("Squeeze", ("Where", ("Reshape", _MASK, None)))
_REPEAT = ("GatherV2", ("Reshape", _TILED, None), _PLACES, 0)


def repeat_rows(node: Node) -> Value:
    """Repeat each tower's own entries, as ``tf.repeat`` does.

    Raises:
        NotDivided: the operation is not the last one of ``tf.repeat``.
    """
    builder, units = node.builder, node.units
    parts = _match_repeat(node)
    layout = Sharded(0, units.of_batch)
    entries, lengths = (
        node.scope.values[parts[name].name] for name in ("entries", "lengths")
    )
    of_lengths, own_lengths = lengths.as_rows()
    require(of_lengths == layout and entries.rank == 1)
    rows = node.converter.shard(entries, layout)
    sources = _source_indices(builder, own_lengths)
    output = units.found_rows(key_of_lengths(own_lengths), sources)
    local = builder.op("GatherV2", [rows, sources, 0], (None,))
    result = Value(output, local, shape=(output.size,))
    rows_of = entries.row_numbers
    if rows_of is not None and rows_of.layout == layout:
        local = builder.op("GatherV2", [rows_of.local, sources, 0], (None,))
        result.meaning = dataclasses.replace(
            rows_of, local=local, layout=output, are_all=False
        )
    return result


def _source_indices(builder: Builder, lengths: Tensor) -> Tensor:
    """Return for each repeated entry the local index of the original."""
    most = builder.op("Max", [lengths, 0], (), keep_dims=False)
    most = builder.op("Maximum", [most, 0], ())
    numbers = builder.op("Range", [0, most, 1], (None,))
    ends = builder.op("ExpandDims", [lengths, 1], (None, 1))
    mask = builder.op("Less", [numbers, ends], (None, None))
    places = builder.op("Where", [mask], (None, 2))
    return builder.op("GatherV2", [places, 0, 1], (None,))


def _match_repeat(node: Node) -> dict[str, tf.Tensor]:
    """Match the operations of ``tf.repeat``; return tensors by pattern name."""
    parts: dict[str, tf.Tensor] = {}
    require(node.shapes[0].rank == 1)
    require(matches(node.operation, _REPEAT, parts))
    for name, pattern in (("most", _MOST), ("all_lengths", _LENGTHS)):
        require(matches(parts[name].op, pattern, parts))
    require(parts["lengths"].dtype in (tf.int32, tf.int64))
    return parts


def matches(
    operation: tf.Operation, pattern: Sequence, parts: dict[str, tf.Tensor]
) -> bool:
    """Whether an operation matches a pattern; if it does, bind its names."""
    type_, *rest = pattern
    if operation.type != type_ or len(rest) > len(operation.inputs):
        return False
    for tensor, wanted in zip(operation.inputs, rest, strict=False):
        if isinstance(wanted, str):
            if parts.setdefault(wanted, tensor) is not tensor:
                return False
        elif isinstance(wanted, int):
            known = tf.get_static_value(tensor)
            if known is None or known.ravel().tolist() != [wanted]:
                return False
        elif wanted is not None and not matches(tensor.op, wanted, parts):
            return False
    return True


# ---- lengths of rows ---------------------------------------------------------


def key_of_lengths(lengths: Tensor) -> Hashable:
    """Return a key for the unit of entries, given the lengths of the rows."""
    lengths = skip_reshapes(lengths)
    source = lengths.operation
    if source is not None and source.type == "Cast":
        (before,) = source.inputs
        if before.dtype.is_integer and lengths.dtype.is_integer:
            return key_of_lengths(before)
    return "repeated", lengths


def note_lengths(units: Units, lengths: Tensor, entries: Sharded) -> None:
    """Note that the lengths of rows add up to the number of entries."""
    unit = entries.unit
    if entries.rows_per_unit == 1 and isinstance(unit, DataDependentUnit):
        units.alias_unit(key_of_lengths(lengths), unit)


# ---- tensors of the program --------------------------------------------------


def skip_reshapes(tensor: Tensor) -> Tensor:
    """Return the tensor at the start of a chain of reshapes."""
    while tensor.operation is not None:
        facts = facts_of(tensor.operation.type)
        # What it reads of a variable may be another value each time.
        if facts.memory != "input" or facts.effect is not None:
            break
        tensor = tensor.operation.inputs[tensor.index]
    return tensor


# ---- what is known of what finds rows ----------------------------------------

operation("Where", _where)
operation("DynamicPartition", _dynamic_partition, notes=[note_taken])
operation("StringSplit StringSplitV2", _split_texts)
operation("SparseCross", _cross_features)
