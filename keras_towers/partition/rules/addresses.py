"""What takes rows by their numbers, where towers number only their own.

Each tower does it with its own numbers, the entries that belong to them, and
the rows that they number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from keras_towers.partition.layouts import Places, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import by_places
from keras_towers.partition.rules.places import source

# What an input is: numbers of rows, or indices of which the first is one; an
# entry for each number; the rows that are numbered; the shape that has them;
# how many they are; or something that all have.
Role: TypeAlias = Literal[
    "numbers", "indices", "entries", "rows", "shape", "count", "same"
]

_NUMBERS = "numbers", "indices"
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
    found = addressed(partition, inputs, _ROLES[node.type])
    if found is None:
        return None
    places, given = found
    layout = places.layout if node.type == "GatherNd" else places.target
    return partition.computed_by_towers(node, given, layout)


def addressed(
    partition: Partitioner,
    inputs: Sequence[Value],
    roles: Sequence[Role],
) -> tuple[Places, list[Tensor]] | None:
    """Return the rows that towers number, and what each is given, or None.

    Args:
        partition: lays out operations.
        inputs: N of its inputs.
        roles: what each is.
    """
    at = 0
    while roles[at] not in _NUMBERS:
        at += 1
    places = _numbered(inputs[at], roles[at])
    if places is None:
        return None
    given = [
        _own(partition, value, role, places)
        for value, role in zip(inputs, roles, strict=True)
    ]
    own = [tensor for tensor in given if tensor is not None]
    return (places, own) if len(own) == len(given) else None


def _numbered(value: Value, role: Role) -> Places | None:
    """The rows that numbers, or indices along a last axis, are those of."""
    found, shape = value.places, value.shape
    if found is None or not shape:
        return None
    if role == "numbers":
        return None if found.is_first_column else found
    is_alone = found.is_first_column or shape[-1] == 1
    return found if is_alone and found.layout.axis < len(shape) - 1 else None


def _own(
    partition: Partitioner, value: Value, role: Role, places: Places
) -> Tensor | None:
    """What each tower is given, or None."""
    target = places.target
    if role in _NUMBERS:
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
        own = partition.times(target.rows, target.unit.count)
        return partition.cast(own, partition.local(value).dtype)
    return partition.local_target(value, list(value.known), target)


@by_places("DynamicStitch", "ParallelDynamicStitch")
def _joined(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """Stitch rows together that were partitioned, if all parts are there."""
    half = len(inputs) // 2
    places = [v.places for v in inputs[:half] if v.places is not None]
    if len(places) < half or not _are_all(places):
        return None
    pairs = zip(inputs[half:], places, strict=True)
    rows = [partition.rows(value, own.layout) for value, own in pairs]
    given = [row for row in rows if row is not None]
    if len(given) < half:
        return None
    numbers = [own.own for own in places]
    return partition.computed_by_towers(
        node, [*numbers, *given], places[0].target
    )


def _are_all(places: Sequence[Places]) -> bool:
    """Whether they are the parts of all rows, each of which is there once."""
    parting = places[0].own.operation
    if parting is None or parting.type != "DynamicPartition":
        return False
    every = source(parting.inputs[0]).operation
    is_range = every is not None and every.type == "Range"
    alike = [own.own for own in places] == parting.outputs
    return is_range and alike and places[0].grain == 1
