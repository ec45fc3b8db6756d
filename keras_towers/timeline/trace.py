"""Events in the trace format of ``chrome://tracing`` and ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline.phases import Calls
from keras_towers.timeline.recorded import (
    HOST,
    OfRank,
    joined,
    rows_of,
    towers_of,
)


def write(path: Path, ranks: Sequence[OfRank], last: int) -> None:
    """Write the events of the last steps, or calls, of ranks on one clock."""
    events = sorted(_events(ranks, last), key=lambda event: event["ts"])
    start = events[0]["ts"] if events else 0.0
    for event in events:
        event["ts"] = round(1e6 * (event["ts"] - start), 1)
        event["dur"] = round(1e6 * event["dur"], 1)
    rows = sorted(rows_of(ranks).items())
    named = [
        {"name": key, "ph": "M", "pid": rank, "tid": row, "args": {kind: value}}
        for (rank, row), name in rows
        for key, kind, value in (
            ("process_name", "name", f"rank {rank}"),
            ("thread_name", "name", name),
            ("thread_sort_index", "sort_index", row),
        )
    ]
    document = {
        "traceEvents": [*named, *events],
        "displayTimeUnit": "ms",
        "otherData": {"machines": [of.machine for of in ranks]},
    }
    path.write_text(json.dumps(document))


def _bar(
    name: str, rank: int, row: int, begin: float, end: float, **facts: int
) -> dict[str, Any]:
    """Make an event of seconds, in the row of ``HOST`` or 1 + a tower's."""
    at = {
        "pid": rank,
        "tid": row,
        "ts": float(begin),
        "dur": float(end - begin),
    }
    return {"name": name, "ph": "X", **at, "args": facts}


def _events(ranks: Sequence[OfRank], last: int) -> Iterator[dict[str, Any]]:
    """Yield the events of the last steps, or calls, of ranks on one clock."""
    phases = phases_lib.of_towers(joined(ranks))
    yield from _of_towers(phases, towers_of(ranks), last, ranks[0].first_step)
    for of in ranks:
        for tower, begin, end in of.spans[-last:]:
            yield _bar("step", of.rank, 1 + int(tower), begin, end)
        yield from _of_host(of, last)


def _of_towers(
    phases: dict[str, np.ndarray],
    towers: Sequence[tuple[int, int]],
    last: int,
    number: int,
) -> Iterator[dict[str, Any]]:
    """Yield the phases of the last steps; ``number``: of the first step."""
    for name, bounds in phases.items():
        first = max(0, len(bounds) - last)
        begins, ends = bounds[first:, ..., 0], bounds[first:, ..., 1]
        for (step, tower, update), begin in np.ndenumerate(begins):
            end = float(ends[step, tower, update])
            # Comparisons with NaN, for a phase without this tower, are False.
            if end > begin or (name != "wait" and end == begin):
                facts = {"step": number + first + step}
                if bounds.shape[2] > 1:
                    facts["update"] = update
                rank, index = towers[tower]
                yield _bar(name, rank, 1 + index, begin, end, **facts)


def _of_host(of: OfRank, last: int) -> Iterator[dict[str, Any]]:
    calls, own = Calls(*of.calls), phases_lib.of_towers(of.stamps)
    steps = phases_lib.in_calls(own, calls)
    traces = calls.have(of.traced)
    shown = range(max(0, len(steps.call) - last), len(steps.call))
    for step in shown:
        call = steps.call[step]
        if call >= 0:
            goes_on = step > 0 and steps.call[step - 1] == call
            name = "tracing" if traces[call] and not goes_on else "input"
            begin, end = steps.ready[step], steps.begins[step]
            number = of.first_step + step
            yield _bar(name, of.rank, HOST, begin, end, step=number)
    first = max(0, len(calls.begins) - last)
    if shown:
        first = max(0, steps.call[shown[0]])
    whole = not len(steps.call) and not len(of.spans)
    for call in range(first, len(calls.begins)):
        begin, end = calls.begins[call], calls.returned[call]
        if whole:
            number = of.first_call + call
            yield _bar("step", of.rank, HOST, begin, end, step=number)
        if calls.nexts[call] > end:
            yield _bar("callbacks", of.rank, HOST, end, calls.nexts[call])
    since = calls.begins[first] if len(calls.begins) else -np.inf
    for name, begin, end in of.others:
        if end >= since:
            yield _bar(name, of.rank, HOST, begin, end)
