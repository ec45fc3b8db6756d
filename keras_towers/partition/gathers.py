"""When the rows of variables in shards are gathered: late, and again.

A whole that is kept takes the memory that shards save. So it is gathered just
before the level that uses it, and again for a later level, such as that of the
backward pass. PyTorch's FSDP calls this to reshard after the forward pass.
"""

from __future__ import annotations

import math

from keras_towers.partition.layouts import Value
from keras_towers.partition.program import Program, Tensor


class Gathers:
    """What is gathered at the end of each level, within a budget.

    Args:
        budget: the bytes that may be kept for all later levels. Of the rest,
            half of it may be gathered for a level, so that with those of the
            level before they are no more. A larger value is gathered alone.
    """

    def __init__(self, budget: int):
        self._budget = budget
        self._kept: dict[tuple[Value, bool], Tensor] = {}
        self._kept_bytes = 0
        self._bytes: dict[int, int] = {}
        self._newest: dict[tuple[Value, bool], tuple[int, Tensor]] = {}

    def find(self, value: Value, on_towers: bool, near: int) -> Tensor | None:
        """Return a whole that was gathered, and is there at a level; or None.

        Args:
            value: the value.
            on_towers: whether every tower needs it, or all have one together.
            near: the level of the operation that uses it.
        """
        key = value, on_towers
        if key in self._kept:
            return self._kept[key]
        level, whole = self._newest.get(key, (-1, None))
        return whole if near - 1 <= level <= near else None

    def level_for(self, size: int, near: int, earliest: int) -> int:
        """Return the level at whose end a value is to be gathered.

        Args:
            size: the bytes of the whole.
            near: the level of the operation that uses it.
            earliest: the level of its rows.
        """
        before = max(near - 1, earliest)
        if self._is_kept(size):
            return before
        there = self._bytes.get(before, 0)
        fits = not there or there + size <= self._budget // 2
        return before if fits else max(near, earliest)

    def add(
        self,
        value: Value,
        on_towers: bool,
        size: int,
        level: int,
        whole: Tensor,
    ) -> None:
        """Record a whole that is gathered at the end of a level."""
        key = value, on_towers
        if self._is_kept(size):
            self._kept_bytes += size
            self._kept[key] = whole
            return
        self._bytes[level] = self._bytes.get(level, 0) + size
        self._newest[key] = level, whole

    def _is_kept(self, size: int) -> bool:
        return self._kept_bytes + size <= self._budget


def gathered_bytes(program: Program) -> list[int]:
    """Return the bytes of gathered variables that a tower has at each level.

    A level has those that it uses, those that are kept, and those that are
    gathered at its end.
    """
    last: dict[Tensor, int] = {}
    for operation in program.operations:
        for tensor in operation.inputs:
            last[tensor] = max(last.get(tensor, 0), operation.level)
    sizes = [0] * (program.levels + 1)
    for exchange in program.exchanges:
        given, result = exchange.given, exchange.result
        if exchange.kind != "gather" or not given.on_towers or given.of_batch:
            continue
        count = result.shape.num_elements()
        size = given.dtype.size * (0 if count is None else count)
        for level in range(given.level, last.get(result, result.level) + 1):
            sizes[level] += size
    return sizes


def whole_bytes(value: Value) -> int:
    """Return the bytes of the whole of a value whose size is known."""
    known = [size for size in value.sizes if isinstance(size, int)]
    assert value.local is not None
    return value.local.dtype.size * math.prod(known)
