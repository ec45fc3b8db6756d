"""What whole numbers say of where the entries of examples are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from keras_towers.partition.sizes import (
    ONE_MORE,
    Size,
    named,
    own,
)
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rounds import source
from keras_towers.splitting.values import (
    Rows,
    Value,
    examples,
    other,
)

if TYPE_CHECKING:
    from keras_towers.splitting.interpreter import Interpreter


@dataclasses.dataclass(frozen=True)
class Place:
    """Numbers of entries, of which every example has its own.

    Each is ``times`` the number of units of the examples ahead of its own, and
    its own part: at least 0, a multiple of ``grain``, and less than ``times``
    the number of units of its example. So it stays within its example.

    Attributes:
        rows: whose they are.
        unit: what they count: examples (None), or entries of them.
        times: how many numbers there are for each unit.
        grain: what divides all own parts.
    """

    rows: Rows
    unit: Size | None
    times: int = 1
    grain: int = 1

    @property
    def picked(self) -> Rows:
        """The rows that they number."""
        return Rows(0, 1, self.times, unit=self.unit)


@dataclasses.dataclass(frozen=True)
class Filled:
    """Places of entries of ragged rows that are filled up with -1."""

    rows: Rows
    unit: Size | None


@dataclasses.dataclass(frozen=True)
class Below:
    """Numbers of at least 0 that are less than a limit."""

    limit: int


@dataclasses.dataclass(frozen=True)
class Columns:
    """Vectors, along the last axis, of a place, a limit or nothing known."""

    rows: Rows
    items: tuple[Place | Below | None, ...]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How many entries of ragged rows each example has."""

    unit: Size


@dataclasses.dataclass(frozen=True)
class Ends:
    """Where ragged rows begin, where they end, or both: one more."""

    unit: Size
    part: str = "all"


def numbered(meaning: Any, shape: Any) -> Value:
    """Return the value of numbers of which only the places are known."""
    text = "numbers the examples of the batch"
    if isinstance(meaning, Ends):
        text = "uses where the rows of a RaggedTensor begin"
    return other(text, of_numbers=True, shape=shape, meaning=meaning)


def of_ragged(index: int, sizes: Sequence[int | None]) -> list[Value]:
    """Return the values of entries and row splits of ragged rows.

    Args:
        index: their place among the tensors of the batch.
        sizes: the shape of an entry.
    """
    unit = own(f"ragged{index}")
    shape = (unit, *named(f"size{index}", sizes))
    return [
        examples(Rows(0, unit=unit), shape=shape),
        numbered(Ends(unit), (ONE_MORE,)),
    ]


def stand_in(value: Value) -> Value:
    """Return a place as if it were the own part of its numbers."""
    if not isinstance(value.meaning, Place | Filled | Columns):
        return value
    return examples(value.meaning.rows, 0, shape=value.shape)


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation that is followed, and what is known where it is.

    Attributes:
        interpreter: follows it.
        node: the operation.
        values: what the tensors of its graph are.
    """

    interpreter: Interpreter
    node: Node
    values: Mapping[str, Value]

    def tensor(self, index: int) -> Any:
        """Return an input."""
        return self.node.operation.inputs[index]

    def known(self, tensor: Any) -> list[Any]:
        """Return the entries of a tensor that are known; else none."""
        value = self.values.get(tensor.name)
        known = None if value is None else value.known
        return [] if known is None else list(known.flat)


Rule: TypeAlias = "Callable[..., Value | Sequence[Value] | None]"
RuleT = TypeVar("RuleT", bound=Rule)
RULES: dict[str, list[Rule]] = {}


def rule(*types: str) -> Callable[[RuleT], RuleT]:
    """Register what a function says of operations on places; None: nothing."""

    def add(function: RuleT) -> RuleT:
        for kind in types:
            RULES.setdefault(kind, []).append(function)
        return function

    return add


def behind(tensor: Any, *types: str) -> Any:
    """Return the operation at the end of a chain of first inputs, or None."""
    operation = None
    for kind in types:
        operation = source(tensor).op
        if operation.type != kind:
            return None
        tensor = operation.inputs[0] if operation.inputs else None
    return operation


def reshaped(tensor: Any) -> Any:
    """Return a tensor that has the same entries in the same order."""
    while tensor.op.type in ("Identity", "Reshape", "ExpandDims", "Squeeze"):
        tensor = tensor.op.inputs[0]
    return tensor
