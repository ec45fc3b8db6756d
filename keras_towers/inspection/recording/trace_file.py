"""Writes the trace of all ranks, in the format of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from keras_towers.foundation.object_types import JsonObject
from keras_towers.inspection.recording.phases import (
    StepTimes,
    find_steps,
    tower_phases,
)
from keras_towers.inspection.recording.recording import (
    RankRecording,
    join_stamps,
    tower_names,
)

# The row of a rank's loop; the rows of towers start at 1.
_LOOP = 0


def write_trace(path: Path, ranks: Sequence[RankRecording], last: int) -> None:
    """Write the events of the last steps, or calls, of aligned ranks."""
    places = [(r.rank, 1 + k) for r in ranks for k in range(len(r.devices))]
    rows = {(r.rank, _LOOP): "input and callbacks" for r in ranks}
    rows |= zip(places, tower_names(ranks), strict=True)
    events = list(_tower_events(ranks, places, last))
    for rank in ranks:
        events += _loop_events(rank, last)
    events.sort(key=lambda event: event["ts"])
    start = events[0]["ts"] if events else 0.0
    for event in events:
        event["ts"] = round(1e6 * (event["ts"] - start), 1)
        event["dur"] = round(1e6 * event["dur"], 1)
    named = [
        {"name": key, "ph": "M", "pid": rank, "tid": row, "args": {kind: value}}
        for (rank, row), name in sorted(rows.items())
        for key, kind, value in (
            ("process_name", "name", f"rank {rank}"),
            ("thread_name", "name", name),
            ("thread_sort_index", "sort_index", row),
        )
    ]
    document = {
        "traceEvents": [*named, *events],
        "displayTimeUnit": "ms",
        "otherData": {"machines": [rank.machine for rank in ranks]},
    }
    path.write_text(json.dumps(document))


def _event(
    name: str, place: tuple[int, int], begin: float, end: float, **facts: int
) -> JsonObject:
    """Make an event from seconds, in a row of a rank."""
    return {
        "name": name,
        "ph": "X",
        "pid": place[0],
        "tid": place[1],
        "ts": float(begin),
        "dur": float(end - begin),
        "args": facts,
    }


def _tower_events(
    ranks: Sequence[RankRecording], places: Sequence[tuple[int, int]], last: int
) -> Iterator[JsonObject]:
    """Yield the phases of the towers' last steps."""
    stamps = join_stamps(ranks)
    first = ranks[0].first_step + max(0, len(stamps) - last)
    for name, bounds in tower_phases(stamps[-last:]).items():
        for (step, tower), begin in np.ndenumerate(bounds[..., 0]):
            end = float(bounds[step, tower, 1])
            # If the tower skipped a phase, its times are NaN: comparisons fail.
            if end > begin or (name != "wait" and end == begin):
                yield _event(name, places[tower], begin, end, step=first + step)
    for rank in ranks:
        for tower, begin, end in rank.spans[-last:]:
            yield _event("step", (rank.rank, 1 + int(tower)), begin, end)


def _loop_events(rank: RankRecording, last: int) -> Iterator[JsonObject]:
    """Yield the input and callbacks around the last steps."""
    calls, place = StepTimes(*rank.calls), (rank.rank, _LOOP)
    steps = find_steps(tower_phases(rank.stamps), calls)
    goes_on = np.diff(steps.call, prepend=-1) == 0
    for step in range(len(steps.call))[-last:]:
        call = steps.call[step]
        if call >= 0:
            traced = calls.traced[call] and not goes_on[step]
            name = "tracing" if traced else "input"
            begin, end = steps.ready[step], steps.begins[step]
            yield _event(name, place, begin, end, step=rank.first_step + step)
    is_divided = len(steps.call) or len(rank.spans)
    for begin, end, ended in zip(
        calls.begins[-last:],
        calls.returns[-last:],
        calls.ended[-last:],
        strict=True,
    ):
        if not is_divided:
            yield _event("step", place, begin, end)
        if ended > end:
            yield _event("callbacks", place, end, ended)
