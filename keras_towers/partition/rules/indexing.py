"""What takes rows, or puts them, by numbers: gathers, scatters and segments.

Where towers number only their own rows, each does it with its own numbers, the
entries that belong to them, and the rows that they number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from keras_towers.partition.builder import UNKNOWN_SHAPE
from keras_towers.partition.division import divided
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Below,
    NotDivided,
    Places,
    Shape,
    Value,
    Values,
    local_shape,
    require,
    sizes_of,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, axes, notes, rule, shape_of
from keras_towers.partition.rules.places import indices_of, source
from keras_towers.partition.rules.ragged import repeated_rows
from keras_towers.partition.rules.reductions import axes_of

# ---- rows that towers number themselves --------------------------------------

# What an input is: numbers of rows, or indices of which the first is one; an
# entry for each number; the rows that are numbered; the shape that has them;
# how many they are; or something that all have.
Role: TypeAlias = Literal[
    "numbers", "indices", "entries", "rows", "shape", "count", "same"
]

_UPDATES = tuple(
    f"TensorScatter{name}" for name in ("Update", "Add", "Sub", "Max", "Min")
)
_EXTREMES = {
    "UnsortedSegmentMax": "Max",
    "UnsortedSegmentMin": "Min",
    "UnsortedSegmentProd": "Prod",
}
_SEGMENTS = ("UnsortedSegmentSum", *_EXTREMES)
_MATRIX: tuple[Role, ...] = ("indices", "entries", "shape")
_ROLES: dict[str, tuple[Role, ...]] = {
    "GatherNd": ("rows", "indices"),
    "ScatterNd": ("indices", "entries", "shape"),
    "SparseToDense": ("indices", "shape", "entries", "same"),
    **dict.fromkeys(_UPDATES, ("rows", "indices", "entries")),
    **dict.fromkeys(_SEGMENTS, ("entries", "numbers", "count")),
}


@rule(*_ROLES)
def _of_own_rows(node: Node, *inputs: Value) -> Values:
    places, operands = _numbered(node.partition, inputs, _ROLES[node.type])
    layout = places.layout if node.type == "GatherNd" else places.target
    return node.on_towers(operands, layout)


def _numbered(
    partition: Partitioner, inputs: Values, roles: Sequence[Role]
) -> tuple[Places, list[Tensor]]:
    """Return the rows that towers number, and what each is given.

    Args:
        partition: lays out operations.
        inputs: N of its inputs.
        roles: what each is.

    Raises:
        NotDivided: if towers do not number their own rows.
    """
    pairs = list(zip(inputs, roles, strict=True))
    (places,) = (
        _places_of(value, role)
        for value, role in pairs
        if role in ("numbers", "indices")
    )
    return places, [
        _own(partition, value, role, places) for value, role in pairs
    ]


def _places_of(value: Value, role: Role) -> Places:
    """The rows that numbers, or indices along a last axis, are those of."""
    places, shape = value.places, value.shape
    if places is None or not shape:
        raise NotDivided
    if role == "numbers":
        require(not places.is_first_column)
    else:
        require(places.is_first_column or shape[-1] == 1)
        require(places.layout.axis < len(shape) - 1)
    return places


def _own(
    partition: Partitioner, value: Value, role: Role, places: Places
) -> Tensor:
    """What each tower is given."""
    target = places.target
    if role in ("numbers", "indices"):
        return places.local
    if role == "same" or (role == "entries" and value.shape == ()):
        return partition.replicated(value)
    if role == "entries":
        return partition.rows(value, places.layout)
    if role == "rows":
        layout, rows = value.as_rows()
        require(layout == target)
        return rows
    # The first size, or the only one.
    known = value.known
    if known is None or known.flat[0] != target.size:
        raise NotDivided
    if role == "count":
        count = partition.times(target.rows, target.unit.count)
        return partition.cast(count, partition.replicated(value).dtype)
    return partition.local_target(value, list(known), target)


@rule("SparseTensorDenseMatMul")
def _product(node: Node, *inputs: Value) -> Values:
    """The product of a matrix that has own rows."""
    partition = node.partition
    *matrix, factor = inputs
    places, operands = _numbered(partition, matrix, _MATRIX)
    if not node.attr("adjoint_a"):
        operands.append(partition.replicated(factor))
        return node.on_towers(operands, places.target)
    # Each row of the matrix meets one of the factor.
    layout = places.target.along(int(node.attr("adjoint_b")))
    rows = partition.rows(factor, layout)
    return node.on_towers([*operands, rows], PARTIAL)


@rule("SparseReorder")
def _ordered(node: Node, *inputs: Value) -> Values:
    """Rows stay in order, and so do the towers."""
    partition = node.partition
    places, operands = _numbered(partition, inputs, _MATRIX)
    at, entries = node.on_towers(operands, *[places.layout] * 2)
    assert at.local is not None
    rank = len(inputs[2].known)
    at = indices_of(partition, at.local, places.layout, places.target, rank)
    return [at, entries]


@rule("DynamicStitch", "ParallelDynamicStitch")
def _stitched(node: Node, *inputs: Value) -> Values:
    """Stitch rows together that were partitioned, if all parts are there."""
    half = len(inputs) // 2
    places = [v.places for v in inputs[:half] if v.places is not None]
    require(len(places) == half and _are_all(places))
    pairs = zip(inputs[half:], places, strict=True)
    rows = [node.partition.rows(value, part.layout) for value, part in pairs]
    numbers = [part.local for part in places]
    return node.on_towers([*numbers, *rows], places[0].target)


def _are_all(places: Sequence[Places]) -> bool:
    """Whether they are the parts of all rows, each of which is there once."""
    parting = places[0].local.operation
    if parting is None or parting.type != "DynamicPartition":
        return False
    parted = source(parting.inputs[0]).operation
    is_range = parted is not None and parted.type == "Range"
    is_complete = [part.local for part in places] == parting.outputs
    return is_range and is_complete and places[0].grain == 1


# ---- gathers -----------------------------------------------------------------


def _axis_and_batch(
    node: Node, values: Value, places: Value, along: Value
) -> tuple[int, int]:
    """The axis from which is picked, and before how many both are alike."""
    axis, *_ = axes_of(along, values.rank)
    batch = node.attr("batch_dims")
    return axis, batch % len(places.sizes) if batch < 0 else batch


@axes("GatherV2")
def _picked_axes(
    node: Node, values: Value, places: Value, along: Value
) -> Factors:
    axis, batch = _axis_and_batch(node, values, places, along)
    kept = [f"v{a}" for a in range(values.rank)]
    picked = [f"p{a}" for a in range(places.rank)]
    # Along these axes both have the same rows.
    picked[:batch] = kept[:batch]
    output = [*kept[:axis], *picked[batch:], *kept[axis + 1 :]]
    labels = [*kept[:axis], None, *kept[axis + 1 :]]
    return Factors([labels, picked, None], [output], [[0]])


@rule("GatherV2")
def _picked(node: Node, values: Value, places: Value, at: Value) -> Values:
    """Rows by their numbers."""
    with contextlib.suppress(NotDivided):
        return [repeated_rows(node)]
    numbered = _places_of(places, "numbers")
    axis, batch = _axis_and_batch(node, values, places, at)
    layout, rows = values.as_rows()
    require(not batch and layout == numbered.target.along(axis))
    operands = [rows, numbered.local, node.partition.replicated(at)]
    layout = numbered.layout.along(axis + numbered.layout.axis)
    return node.on_towers(operands, layout)


@notes("GatherV2")
def _picks(node: Node, inputs: Values, outputs: Values) -> None:
    """What picks from an axis of each row is less than its size."""
    values, places, at = inputs
    axis, batch = _axis_and_batch(node, values, places, at)
    size = values.sizes[axis]
    if axis == batch > 0 and isinstance(size, int) and not places.numbers:
        places.numbers = Below(size)


def _labels_of_indices(places: Value) -> tuple[list[str], int]:
    """Labels of all axes of indices but the last, and the last one's size."""
    depth = places.shape[-1] if places.shape else None
    if not isinstance(depth, int):
        raise NotDivided
    return [f"p{a}" for a in range(places.rank - 1)], depth


@axes("GatherNd")
def _picked_at(node: Node, values: Value, places: Value) -> Factors:
    picked, depth = _labels_of_indices(places)
    behind = [f"v{a}" for a in range(depth, values.rank)]
    return Factors(
        [[*[None] * depth, *behind], [*picked, None]],
        [[*picked, *behind]],
        [[0]],
        needs_rows=True,
    )


@rule("ResourceGather")
def _looked_up(node: Node, handle: Value, places: Value) -> Values:
    partition = node.partition
    layout, own = places.as_rows()
    require(not node.attr("batch_dims"))
    # The variable is read once, for all towers, or each reads its own copy.
    variable = partition.replicated(handle)
    least = partition.order.use(node, [variable], True)
    table = partition.read(variable, node.output_dtype(), UNKNOWN_SHAPE, least)
    local = partition.op(
        "GatherV2",
        [table, own, 0],
        local_shape(node.shapes[0], layout),
        batch_dims=0,
    )
    shape = None
    if node.shapes[0].rank is not None:
        shape = (*places.sizes, *sizes_of(node.shapes[0][places.rank :]))
    return [Value(layout, local, shape=shape)]


# ---- scatters ----------------------------------------------------------------


@axes("ScatterNd")
def _scattered(
    node: Node, places: Value, rows: Value, target: Value
) -> Factors:
    picked, depth = _labels_of_indices(places)
    behind = [f"v{a}" for a in range(rows.rank - len(picked))]
    # The shape that is made is that of one device.
    labels = [*picked, *[None] * len(behind)]
    return Factors(
        [[*picked, None], labels, None],
        [[*[None] * depth, *behind]],
        [[1]],
        picked,
    )


@rule("TensorScatterAdd", "TensorScatterSub")
def _added_to(node: Node, values: Value, *inputs: Value) -> Values:
    """Towers add their own rows to their parts of what is there."""
    places, rows = inputs
    require(rows.shape is not None and values.sharded is None)
    scattered = _scattered(node, places, rows, values)
    added = Value(
        REPLICATED, node.partition.partial(values), shape=values.shape
    )
    factors = Factors(
        [None, *scattered.inputs[:2]], scattered.outputs, (), scattered.summed
    )
    return divided(node, [added, places, rows], factors)


# ---- segments ----------------------------------------------------------------


@shape_of(*_SEGMENTS)
def _sizes(node: Node, values: Value, segments: Value, count: Value) -> Shape:
    return (count.number, *values.sizes[len(segments.sizes) :])


@axes(*_SEGMENTS)
def _segment_axes(
    node: Node, values: Value, segments: Value, count: Value
) -> Factors:
    labels = range(values.rank)
    of_segments, behind = labels[: segments.rank], labels[segments.rank :]
    is_sum = node.type == "UnsortedSegmentSum"
    return Factors(
        [labels, of_segments, None],
        [[None, *behind]],
        [[0]] if is_sum else (),
        of_segments if is_sum else (),
    )


@rule(*_EXTREMES)
def _extremes(
    node: Node,
    values: Value,
    segments: Value,
    count: Value,
) -> Values:
    """Reduce segments on each tower, then reduce the towers' results.

    Where a tower has no rows of a segment, it gives the neutral value.
    """
    partition = node.partition
    shape = node.shapes[0]
    layout, _ = (segments if segments.sharded else values).as_rows()
    require(layout.axis < segments.rank and shape.rank is not None)
    rows = [partition.rows(value, layout) for value in (values, segments)]
    operands = [*rows, partition.replicated(count)]
    (extremes,) = node.copy(operands)
    extremes = partition.op("ExpandDims", [extremes, 0], [1, *shape])
    gathered = partition.exchange("gather", extremes)
    kind = _EXTREMES[node.type]
    whole = partition.op(kind, [gathered, [0]], shape, keep_dims=False)
    return [Value(REPLICATED, whole=whole)]


@axes("Bincount", "DenseBincount")
def _counted(node: Node, values: Value, size: Value, weights: Value) -> Factors:
    labels: list[Any] = list(range(values.rank))
    # Of a matrix the rows are counted, each for itself.
    is_dense = node.type == "DenseBincount"
    is_matrix = is_dense and values.rank == 2
    if is_matrix:
        labels[1] = None
    elif is_dense:
        # What only says if there is any cannot be added up.
        require(not node.attr("binary_output"))
    is_weighted = weights.shape != (0,)
    operands = [labels, None, labels if is_weighted else [None]]
    if is_matrix:
        return Factors(operands, [labels])
    return Factors(operands, [[None]], [[2]] if is_weighted else (), labels)
