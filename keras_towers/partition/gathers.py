"""When a step gathers weights in shards, within ``gather_bytes``.

A gathered weight takes the memory that shards save. So it is gathered right
before the level that uses it. If there is room at all levels up to a later use,
such as that in the backward pass, the tower keeps it; otherwise it is gathered
again. In PyTorch's FSDP this is "reshard after forward".
"""

from __future__ import annotations

import collections
import dataclasses
import math

from keras_towers.partition.axes import Axes
from keras_towers.partition.program import Exchange, Program, Tensor
from keras_towers.partition.values import Value


@dataclasses.dataclass
class _Whole:
    """A gathered variable, and the levels between which a tower keeps it.

    Attributes:
        size: its bytes.
        level: the level at whose end it is gathered.
        last: the last level that uses it, so far.
        tensor: the whole.
    """

    size: int
    level: int
    last: int
    tensor: Tensor


class Gathers:
    """Gathers variables at the ends of levels, within a budget of bytes.

    One level may gather a quarter of the budget. Together with the level
    before, that leaves half of it for variables that are kept. A larger
    variable is gathered alone, and may exceed the budget.

    Args:
        budget: the bytes of gathered wholes at any level.
    """

    def __init__(self, budget: int):
        self._budget = budget
        self._newest: dict[tuple[Value, Axes], _Whole] = {}
        # By level: the bytes that exist there, and what is gathered at its end.
        self._held: collections.Counter[int] = collections.Counter()
        self._gathered: dict[int, list[_Whole]] = {}

    def find(self, value: Value, to: Axes, near: int) -> Tensor | None:
        """Return a gathered variable that can be kept until a level, or None.

        Args:
            value: the value.
            to: the axes along which everyone needs a whole of its own.
            near: the level of the inputs of the operation that uses it.

        Returns:
            The whole; None: there is none, or no room to keep it.
        """
        whole = self._newest.get((value, to))
        if whole is None:
            return None
        first, last = whole.last + 1, max(near, whole.last)
        # Others have to find room beside it where it is used.
        limits = dict.fromkeys(range(first, last), self._budget)
        if last >= first:
            limits[last] = self._budget // 2
        if not self._has_room(whole.size, limits):
            return None
        self._held.update(dict.fromkeys(limits, whole.size))
        whole.last = last
        return whole.tensor

    def level_for(self, size: int, near: int, earliest: int) -> int:
        """Return the level at whose end a variable is to be gathered.

        Args:
            size: the bytes of the whole.
            near: the level of the inputs of the operation that uses it.
            earliest: the level of its rows.
        """
        level = max(near - 1, earliest)
        # The next one may have to be gathered at the level that uses this one.
        limits = {level: self._budget, level + 1: self._budget * 3 // 4}
        while not self._may_gather(size, level, limits):
            if level >= near and not self._gathered.get(level):
                # Nothing would wait for a later level.
                break
            level += 1
            limits = dict.fromkeys((level, level + 1), self._budget)
        return level

    def add(
        self, value: Value, to: Axes, size: int, level: int, tensor: Tensor
    ) -> None:
        """Record that a variable is gathered at the end of a level."""
        whole = _Whole(size, level, level + 1, tensor)
        self._newest[value, to] = whole
        self._gathered.setdefault(level, []).append(whole)
        self._held.update(dict.fromkeys((level, level + 1), size))

    def _may_gather(
        self, size: int, level: int, limits: dict[int, int]
    ) -> bool:
        there = sum(whole.size for whole in self._gathered.get(level, ()))
        fits = not there or there + size <= self._budget // 4
        return fits and self._has_room(size, limits)

    def _has_room(self, size: int, limits: dict[int, int]) -> bool:
        """Whether a variable fits at each of some levels, or is alone there."""
        return all(
            not self._held[level] or self._held[level] + size <= most
            for level, most in limits.items()
        )


def gathers_variables(exchange: Exchange) -> bool:
    """Whether an exchange gathers a variable in shards."""
    given = exchange.given.axes
    return (
        exchange.kind == "gather"
        and "towers" in given
        and "micro_batches" not in given
    )


def gathered_bytes(program: Program) -> list[int]:
    """Return the bytes of gathered variables that a tower has at each level.

    They are the variables that the level uses, keeps, or gathers at its end.
    """
    last = collections.Counter[Tensor]()
    for operation in program.operations:
        for tensor in operation.inputs:
            last[tensor] = max(last[tensor], operation.level)
    sizes = [0] * (program.levels + 1)
    for exchange in program.exchanges:
        part, result = exchange.given, exchange.result
        if not gathers_variables(exchange):
            continue
        count = result.shape.num_elements()
        size = part.dtype.size * (0 if count is None else count)
        for level in range(exchange.level, last.get(result, result.level) + 1):
            sizes[level] += size
    return sizes


def whole_bytes(value: Value) -> int:
    """Return the bytes of a whole value with known sizes."""
    known = [size for size in value.sizes if isinstance(size, int)]
    assert value.local is not None
    return value.local.dtype.size * math.prod(known)
