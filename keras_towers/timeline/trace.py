"""Events in Chrome's trace format.

It is described in "Trace Event Format" by the authors of Chrome's trace viewer.
``chrome://tracing`` and https://ui.perfetto.dev show such files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HOST = 0


class Event(NamedTuple):
    """A bar of the trace.

    Attributes:
        name: its label.
        rank: its process.
        row: the row there: ``HOST``, or 1 + the tower's index in its process.
        begin: in seconds since 1970.
        end: likewise.
        facts: more to show, by name.
    """

    name: str
    rank: int
    row: int
    begin: float
    end: float
    facts: dict[str, Any] = {}


def of_towers(
    phases: dict[str, np.ndarray],
    towers: Sequence[tuple[int, int]],
    last: int,
    number: int = 0,
) -> Iterator[Event]:
    """Yield the phases of the last steps; ``number``: of the first step."""
    for name, bounds in phases.items():
        first = max(0, len(bounds) - last)
        begins, ends = bounds[first:, ..., 0], bounds[first:, ..., 1]
        for (step, tower, update), begin in np.ndenumerate(begins):
            end = ends[step, tower, update]
            # Comparisons with NaN, for a phase without this tower, are False.
            if end > begin or (name != "wait" and end == begin):
                facts = {"step": number + first + step}
                if bounds.shape[2] > 1:
                    facts["update"] = update
                rank, index = towers[tower]
                yield Event(
                    name, rank, 1 + index, float(begin), float(end), facts
                )


def write(
    path: Path,
    events: Iterable[Event],
    rows: dict[tuple[int, int], str],
    facts: dict[str, Any],
) -> None:
    """Write events; rows are named by rank and row."""
    events = sorted(events, key=lambda event: event.begin)
    start = events[0].begin if events else 0.0
    named: list[dict[str, Any]] = [
        {
            "name": "process_name",
            "ph": "M",
            "pid": rank,
            "tid": HOST,
            "args": {"name": f"rank {rank}"},
        }
        for rank in sorted({rank for rank, _ in rows})
    ]
    for (rank, row), name in sorted(rows.items()):
        for key, value in (("name", name), ("sort_index", row)):
            named.append(
                {
                    "name": f"thread_{key}",
                    "ph": "M",
                    "pid": rank,
                    "tid": row,
                    "args": {key: value},
                }
            )
    complete = [
        {
            "name": event.name,
            "ph": "X",
            "pid": event.rank,
            "tid": event.row,
            "ts": round(1e6 * (event.begin - start), 1),
            "dur": round(1e6 * (event.end - event.begin), 1),
            "args": event.facts,
        }
        for event in events
    ]
    document = {
        "traceEvents": [*named, *complete],
        "displayTimeUnit": "ms",
        "otherData": facts,
    }
    path.write_text(json.dumps(document))
