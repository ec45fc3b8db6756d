"""Symbolic sizes: exact expressions in the number of examples.

A trace knows its shapes except for the number of examples, and for sizes such
as the length of the longest text of a batch. Symbols stand for these, and what
a step computes from shapes is computed symbolically.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias


class Unknown:
    """A number or truth value that is not known before the step runs.

    Like NaN it is equal to nothing, not even to itself. Containers that hold it
    compare it by identity, as they do with NaN.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def _unknown(self, *_: object) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __abs__ = _unknown
    __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _unknown
    __mod__ = __rmod__ = _unknown

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()
ASSUMED_LENGTH = 64
"""The size to assume, where it only matters for the cost, if it is unknown.

It stands for the examples of a batch, the entries of an axis or the rounds of a
loop.
"""


@dataclasses.dataclass(frozen=True)
class Size:
    """A product of a number and powers of symbols.

    Attributes:
        number: the number.
        powers: the symbols and their powers, sorted by symbol.
    """

    number: int
    powers: tuple[tuple[str, int], ...]

    def __mul__(self, other: Any) -> Dimension:
        if isinstance(other, Unknown):
            return UNKNOWN
        other = other if isinstance(other, Size) else Size(other, ())
        powers = dict(self.powers)
        for symbol, power in other.powers:
            powers[symbol] = powers.get(symbol, 0) + power
        return _size(self.number * other.number, powers)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Dimension:
        if isinstance(other, Unknown) or other == 0:
            return UNKNOWN
        other = other if isinstance(other, Size) else Size(other, ())
        powers = dict(self.powers)
        for symbol, power in other.powers:
            powers[symbol] = powers.get(symbol, 0) - power
        if self.number % other.number or min(powers.values()) < 0:
            # The quotient is not an integer for all symbols.
            return UNKNOWN
        return _size(self.number // other.number, powers)

    def __rfloordiv__(self, other: object) -> Dimension:
        return UNKNOWN

    def __mod__(self, other: object) -> Dimension:
        return UNKNOWN if self // other is UNKNOWN else 0

    def __rmod__(self, other: object) -> Dimension:
        return UNKNOWN

    def __add__(self, other: object) -> Dimension:
        if other in (1, -1):
            return one_more(self) if other == 1 else one_less(self)
        if isinstance(other, Size) and other.powers == self.powers:
            return _size(self.number + other.number, dict(self.powers))
        return UNKNOWN if isinstance(other, (Size, Unknown)) or other else self

    __radd__ = __add__

    def __neg__(self) -> Dimension:
        return self * -1

    def __sub__(self, other: Dimension) -> Dimension:
        return self + -other

    def __rsub__(self, other: Dimension) -> Dimension:
        return -self + other

    def __abs__(self) -> Dimension:
        return self if self.number >= 0 else -self

    def __repr__(self) -> str:
        factors = [s if p == 1 else f"{s}^{p}" for s, p in self.powers]
        return "*".join(
            [*([] if self.number == 1 else [str(self.number)]), *factors]
        )


Dimension: TypeAlias = "int | bool | float | Size | Unknown"

# The global number of examples.
EXAMPLES = Size(1, (("n", 1),))
_OWN = "*"
_MORE = "+1"


def symbol(name: str) -> Size:
    """Return a symbol for a size that is the same on all towers."""
    return Size(1, ((name, 1),))


def symbol_name(size: Size) -> str:
    """Return the name of a symbol."""
    ((name, _),) = size.powers
    return name


def data_dependent_symbol(name: str) -> Size:
    """Return a symbol for a size that depends on a tower's data.

    The global size is the sum of the local ones.
    """
    return Size(1, ((_OWN + name, 1),))


def one_more(size: Size) -> Dimension:
    """Return a size plus 1, such as the number of row splits."""
    (name, _), *_ = size.powers
    return symbol(name + _MORE) if size == symbol(name) else UNKNOWN


def one_less(size: Size) -> Dimension:
    """Return a size minus 1; undoes ``one_more``."""
    (name, _), *_ = size.powers
    is_more = name.endswith(_MORE) and size == symbol(name)
    return symbol(name.removesuffix(_MORE)) if is_more else UNKNOWN


def is_data_dependent(size: Dimension) -> bool:
    """Whether a size depends on the data of a tower."""
    return isinstance(size, Size) and any(
        symbol.startswith(_OWN) for symbol, _ in size.powers
    )


def multiple_of(size: Dimension, unit: Size) -> int | None:
    """Return m if a size is m times another size, else None."""
    quotient = size // unit if isinstance(size, Size) else None
    return quotient if isinstance(quotient, int) else None


def _size(number: int, powers: dict[str, int]) -> Dimension:
    left = tuple(sorted((s, p) for s, p in powers.items() if p))
    return Size(number, left) if left and number else number


def compared(
    compare: Callable[[Any, Any], bool], a: Dimension, b: Dimension
) -> bool | Unknown:
    """Compare sizes with an operator, such as ``operator.lt``.

    A symbol may be any number from 0 on: a batch or a text may be empty.
    """
    if UNKNOWN in (a, b):
        return UNKNOWN
    difference = a - b
    if difference is not UNKNOWN:
        a, b = difference, 0
    ends_a, ends_b = _ends(a), _ends(b)
    results = {compare(x, y) for x in ends_a for y in ends_b}
    is_apart = max(ends_a) < min(ends_b) or max(ends_b) < min(ends_a)
    if compare in (operator.eq, operator.ne) and not is_apart:
        results.add(compare(0, 0))
    return results.pop() if len(results) == 1 else UNKNOWN


def _ends(size: Dimension) -> tuple[Any, Any]:
    """Return the smallest and the largest possible value of a size."""
    if not isinstance(size, Size):
        return size, size
    least = math.prod(name.count(_MORE) ** p for name, p in size.powers)
    return size.number * least, size.number * math.inf


def broadcast(a: Sequence[object], b: Sequence[object]) -> list[Dimension]:
    """Return the shape of a broadcast of two shapes."""
    rank = max(len(a), len(b))
    padded = [[1] * (rank - len(s)) + list(s) for s in (a, b)]
    return [broadcast_size(d, e) for d, e in zip(*padded, strict=True)]


def broadcast_size(d: Dimension, e: Dimension) -> Dimension:
    """Return the size of a broadcast of two axes.

    It is unknown for two different symbols, as either may be 1 when the step
    runs.
    """
    if d == e or e == 1:
        return d
    if d == 1:
        return e
    return next((size for size in (d, e) if isinstance(size, int)), UNKNOWN)
