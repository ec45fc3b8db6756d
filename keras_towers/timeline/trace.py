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
    """Something that took a while.

    Attributes:
        name: what.
        rank: the process, which is a process of the trace.
        row: the row there: ``HOST``, or 1 + the tower's index in its process.
        begin: in seconds since 1970.
        end: likewise.
        facts: what else to show of it, by name.
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
    """The phases of the last steps, each with the number of its step.

    Args:
        phases: as ``phases.of_towers`` returns them.
        towers: rank and local index of each tower.
        last: number of steps.
        number: that of the first of all these steps.
    """
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
    """Write a trace.

    Args:
        path: where to.
        events: in any order.
        rows: names of the rows, by rank and row.
        facts: what else to keep in the file.
    """
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
