"""What takes rows by their numbers, where towers number only their own.

Each tower does it with its own numbers, the entries that belong to them, and
the rows that they number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from keras_towers.partition.layouts import Places, Shape, Sharded, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner, local_shape
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import by_places, shape_of
from keras_towers.partition.rules.places import source

# What an input is: numbers of rows, or indices of which the first is one; an
# entry for each number; the rows that are numbered; the shape that has them;
# how many they are; or something that all have.
Role: TypeAlias = Literal[
    "numbers", "indices", "entries", "rows", "shape", "count", "same"
]

_UPDATES = tuple(
    f"TensorScatter{name}" for name in ("Update", "Add", "Sub", "Max", "Min")
)
_SEGMENTS = tuple(
    f"UnsortedSegment{name}" for name in ("Sum", "Max", "Min", "Prod")
)
_ROLES: dict[str, tuple[Role, ...]] = {
    "GatherNd": ("rows", "indices"),
    "ScatterNd": ("indices", "entries", "shape"),
    "SparseToDense": ("indices", "shape", "entries", "same"),
    **dict.fromkeys(_UPDATES, ("rows", "indices", "entries")),
    **dict.fromkeys(_SEGMENTS, ("entries", "numbers", "count")),
}


@by_places(*_ROLES)
def _of_own_rows(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    found = addressed(partition, node, inputs, _ROLES[node.type])
    if found is None:
        return None
    places, given = found
    layout = places.layout if node.type == "GatherNd" else places.target
    size = local_shape(node.shapes[0], layout)
    (local,) = partition.builder.copy(node.operation, given, [size])
    return [Value(layout, local)]


@shape_of(*_UPDATES)
def _of_updated(node: Node, values: Value, *rest: Value) -> Shape | None:
    return values.shape


def addressed(
    partition: Partitioner,
    node: Node,
    inputs: Sequence[Value],
    roles: Sequence[Role],
) -> tuple[Places, list[Tensor]] | None:
    """Return the rows that towers number, and what each is given, or None.

    Args:
        partition: lays out operations.
        node: the operation.
        inputs: N of its inputs.
        roles: what each is.
    """
    places: Places | None = None
    for value, role in zip(inputs, roles, strict=True):
        if role == "numbers":
            places = value.places
            if places is not None and places.is_first_column:
                return None
        if role == "indices":
            places = _indexed(value)
    if places is None:
        return None
    given: list[Tensor] = []
    for index, (value, role) in enumerate(zip(inputs, roles, strict=True)):
        own = _own(partition, value, role, places)
        if own is None:
            return None
        if role == "count":
            own = partition.cast(own, node.dtype(index))
        given.append(own)
    return places, given


def _indexed(value: Value) -> Places | None:
    """The rows that indices number along the first axis of a tensor."""
    found, shape = value.places, value.shape
    if found is None or not shape or found.layout.axis == len(shape) - 1:
        return None
    return found if found.is_first_column or shape[-1] == 1 else None


def _own(
    partition: Partitioner, value: Value, role: Role, places: Places
) -> Tensor | None:
    """What each tower is given, or None."""
    target = places.target
    if role in ("numbers", "indices"):
        return places.own
    if role == "same" or (role == "entries" and value.shape == ()):
        return partition.local(value)
    if role == "entries":
        return partition.rows(value, places.layout)
    if role == "rows":
        return value.local if value.sharded == target else None
    # The first size, or the only one.
    if value.known is None or value.known.flat[0] != target.size:
        return None
    if role == "count":
        return partition.times(target.rows, target.unit.count)
    return partition.local_target(value, list(value.known), target)


@by_places("DynamicStitch", "ParallelDynamicStitch")
def _joined(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """What was parted is joined by the parts of the numbers of all rows."""
    half = len(inputs) // 2
    layout = _all_rows(inputs[:half])
    if layout is None:
        return None
    given = []
    for places, values in zip(inputs[:half], inputs[half:], strict=True):
        own = places.places and partition.rows(values, places.places.layout)
        if own is None:
            return None
        given.append(own)
    numbers = [value.places.own for value in inputs[:half] if value.places]
    (local,) = partition.builder.copy(
        node.operation,
        [*numbers, *given],
        [local_shape(node.shapes[0], layout)],
    )
    behind = (inputs[half].shape or ())[1:]
    return [Value(layout, local, shape=(layout.size, *behind))]


def _all_rows(inputs: Sequence[Value]) -> Sharded | None:
    """The rows that numbers are the parts of, each of them once; or None."""
    places = inputs[0].places
    parting = places and places.own.operation
    if places is None or parting is None or places.grain != 1:
        return None
    numbers = [value.places and value.places.own for value in inputs]
    if parting.type != "DynamicPartition" or numbers != parting.outputs:
        return None
    every = source(parting.inputs[0]).operation
    return places.target if every and every.type == "Range" else None
