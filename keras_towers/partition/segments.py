"""Divides a step into segments that are recomputed.

``fit/context/remat_scopes.py`` records the segments that users mark, and
``rematerialization.py`` recomputes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from keras_towers.partition.program import Exchange, Operation


@dataclasses.dataclass(frozen=True)
class Division:
    """A division of a step into segments, by the positions of its events.

    Attributes:
        segment_of: returns the segment of an operation; None: it runs once.
        is_late: whether an operation uses what is computed again.
        keeps_products: whether the results of products are kept.
    """

    segment_of: Callable[[int], int | None]
    is_late: Callable[[int], bool]
    keeps_products: bool = False


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
