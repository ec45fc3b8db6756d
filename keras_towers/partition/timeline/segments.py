"""Divides a step into segments that are recomputed.

``fit/context/remat_scopes.py`` records the segments that users mark, and
``rematerialization.py`` recomputes them.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from keras_towers.partition.ir.program import Exchange, Operation
from keras_towers.partition.timeline.memory_estimate import ALIKE


@dataclasses.dataclass(frozen=True)
class Division:
    """A division of a step into segments, by the positions of its events.

    Attributes:
        segment_of: returns the segment of an operation; None: it runs once.
        is_late: whether an operation uses what is computed again.
        kept: the positions of operations that run once all the same.
    """

    segment_of: Callable[[int], int | None]
    is_late: Callable[[int], bool]
    kept: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """The segments that users mark to be recomputed.

    Attributes:
        paths: for the names of traced operations, the numbers of the segments
            that they belong to, the outer ones first.
        is_of_gradient: tells by its name whether a traced operation computes
            gradients. Only these use what is computed again.
    """

    paths: Mapping[str, tuple[int, ...]]
    is_of_gradient: Callable[[str], bool]

    def divisions(
        self, events: Sequence[Operation | Exchange]
    ) -> Iterator[Division]:
        """Yield divisions of a step, from the outermost segments inwards.

        The first one has the segments that are in no other, the next one those
        directly inside of these, and so on.
        """
        names = [
            event.name if isinstance(event, Operation) else ""
            for event in events
        ]
        for depth in range(max(map(len, self.paths.values()))):

            def segment_of(position: int, depth: int = depth) -> int | None:
                path = self.paths.get(names[position])
                return path[: depth + 1][-1] if path else None

            def is_late(position: int) -> bool:
                name = names[position]
                # A segment may compute gradients of its own.
                return name not in self.paths and self.is_of_gradient(name)

            yield Division(segment_of, is_late)


def ends_of_segments(
    held: Sequence[int], crossing: Sequence[int], size: float
) -> list[int]:
    """Return the ends of segments, each of which holds about so many bytes.

    Each ends where the fewest bytes pass its end: at the first such place, such
    as before a normalization.

    Args:
        held: for each position the bytes that are held of all before it.
        crossing: for each position the bytes that pass it.
        size: the bytes that a segment holds.
    """
    start, end = 0, len(held) - 1
    ends: list[int] = []
    while start < end:
        most = held[start] + size
        last = bisect.bisect_right(held, most, start + 1, end) - 1
        last = max(last, start + 1)
        if last >= end - 1:
            ends.append(end)
            break
        # Not so early that there would be many more segments.
        start = bisect.bisect_left(held, most - size / 2, start + 1, last)
        limit = ALIKE * min(crossing[start : last + 1])
        while crossing[start] > limit:
            start += 1
        ends.append(start)
    return ends
