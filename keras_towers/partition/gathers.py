"""When the rows of variables in shards are gathered: late, and again.

A whole that is kept takes the memory that shards save. So it is gathered just
before the level that uses it, and again for a later level, such as that of the
backward pass. PyTorch's FSDP calls this to reshard after the forward pass.
"""

from __future__ import annotations

from keras_towers.partition.layouts import Value
from keras_towers.partition.program import Tensor


class Gathers:
    """What is gathered at the end of each level, within a budget.

    Args:
        budget: the bytes that may be gathered for one level, and the bytes that
            may be kept for all later ones. A larger value is gathered alone.
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
        before_bytes = self._bytes.get(before, 0)
        fits = not before_bytes or before_bytes + size <= self._budget
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
        if self._kept_bytes + size <= self._budget:
            self._kept_bytes += size
            self._kept[key] = whole
            return
        self._bytes[level] = self._bytes.get(level, 0) + size
        self._newest[key] = level, whole
