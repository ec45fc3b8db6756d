"""What the ranks have measured, brought together."""

from __future__ import annotations

import dataclasses
import inspect
import platform
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_towers import devices as devices_lib
from keras_towers.cores import usable_cores
from keras_towers.fit.context import marks
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline import trace
from keras_towers.timeline.advice import Measured
from keras_towers.timeline.host import Host
from keras_towers.timeline.phases import Calls
from keras_towers.timeline.trace import HOST, Event


@dataclasses.dataclass
class OfRank:
    """What one rank has measured; all times are in seconds since 1970.

    Attributes:
        rank: the rank.
        machine: on which machine it runs.
        devices: the devices of its towers.
        stamps: as ``fit.context.marks.Recorder.steps`` returns them.
        spans: towers, begins and ends of steps that are a tower's own, of shape
            [steps, 3].
        traced: when its step was traced.
        calls: those of the train function, of shape [3, calls].
        others: what else its host did, as names, begins and ends.
    """

    rank: int
    machine: str
    devices: list[str]
    stamps: np.ndarray
    spans: np.ndarray
    traced: np.ndarray
    calls: np.ndarray
    others: list[Any]

    @classmethod
    def of(
        cls,
        rank: int,
        devices: Sequence[str],
        recorder: marks.Recorder,
        host: Host,
    ) -> OfRank:
        """Take over what was recorded on this rank."""
        host.end()
        stamps = recorder.steps()
        if np.isnan(stamps[..., marks.POINTS.index("computed")]).all():
            # Gradients of these steps go other ways than through marks.
            stamps = stamps[:0]
        return cls(
            rank,
            platform.node(),
            [tower_lib.short_name(device) for device in devices],
            stamps,
            np.array(recorder.spans, np.float64).reshape(-1, 3),
            np.array(recorder.traced, np.float64),
            np.stack(host.calls()),
            [list(other) for other in host.others],
        )

    def plain(self) -> dict[str, Any]:
        """Return it as values that can be sent to other ranks."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def shift(self, seconds: float) -> None:
        """Set its clock back."""
        self.stamps = self.stamps - seconds
        self.spans = self.spans - [0, seconds, seconds]
        self.traced = self.traced - seconds
        self.calls = self.calls - seconds
        self.others = [[n, b - seconds, e - seconds] for n, b, e in self.others]


def align(ranks: Sequence[OfRank]) -> None:
    """Set the clocks of all ranks by that of rank 0."""
    stamps = [of.stamps for of in ranks]
    machines = [of.machine for of in ranks]
    shifts = phases_lib.clock_shifts(stamps, machines)
    for of, seconds in zip(ranks, shifts, strict=True):
        of.shift(seconds)


def towers_of(ranks: Sequence[OfRank]) -> list[tuple[int, int]]:
    """Rank and local index of each tower."""
    return [(of.rank, k) for of in ranks for k in range(len(of.devices))]


def rows_of(ranks: Sequence[OfRank]) -> dict[tuple[int, int], str]:
    """Names of the rows of the trace, by rank and row."""
    rows = {(of.rank, HOST): "input and callbacks" for of in ranks}
    devices = [device for of in ranks for device in of.devices]
    for index, (rank, local) in enumerate(towers_of(ranks)):
        rows[rank, 1 + local] = f"tower {index} ({devices[index]})"
    return rows


def facts_of(ranks: Sequence[OfRank]) -> dict[str, Any]:
    """What the file keeps besides the events."""
    return {"machines": [of.machine for of in ranks]}


def events_of(ranks: Sequence[OfRank], last: int) -> Iterator[Event]:
    """All events of the last steps.

    Args:
        ranks: on one clock.
        last: number of steps, or of calls where steps have no phases.
    """
    stamps = phases_lib.joined([of.stamps for of in ranks])
    phases = phases_lib.of_towers(stamps)
    yield from trace.of_towers(phases, towers_of(ranks), last)
    for of in ranks:
        for tower, begin, end in of.spans[-last * max(len(of.devices), 1) :]:
            yield Event("step", of.rank, 1 + int(tower), begin, end)
        yield from _of_host(of, last)


def _of_host(of: OfRank, last: int) -> Iterator[Event]:
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
            yield Event(name, of.rank, HOST, begin, end, {"step": step})
    first = max(0, len(calls.begins) - last)
    if shown:
        first = max(0, steps.call[shown[0]])
    whole = not len(steps.call) and not len(of.spans)
    for call in range(first, len(calls.begins)):
        begin, end = calls.begins[call], calls.returned[call]
        if whole:
            yield Event("step", of.rank, HOST, begin, end, {"step": call})
        if calls.nexts[call] > end:
            yield Event("callbacks", of.rank, HOST, end, calls.nexts[call])
    since = calls.begins[first] if len(calls.begins) else -np.inf
    for name, begin, end in of.others:
        if end >= since:
            yield Event(name, of.rank, HOST, begin, end)


class Summary(NamedTuple):
    """What there is to say of a ``fit``.

    Attributes:
        measured: what advice is derived from.
        towers: median seconds of each tower, by the name of the phase.
        steps: how many steps were measured.
        missing: what is not measured, and why; empty: nothing.
    """

    measured: Measured
    towers: dict[str, np.ndarray]
    steps: int
    missing: str


def summarise(
    ranks: Sequence[OfRank], model: keras.Model, config: TowerConfig | None
) -> Summary:
    """Say where the time went.

    Args:
        ranks: on one clock; rank 0 is the first.
        model: the model that was trained.
        config: the towers of this rank; None: none.
    """
    first, calls = ranks[0], Calls(*ranks[0].calls)
    stamps = phases_lib.joined([of.stamps for of in ranks])
    spans = np.concatenate([of.spans for of in ranks])
    names = [name for (_, row), name in sorted(rows_of(ranks).items()) if row]
    phases, towers, missing, busy = {}, {}, "", None
    if len(stamps):
        every = phases_lib.of_towers(stamps)
        # Its own towers waited for those of other ranks, too.
        own = {n: b[:, : len(first.devices)] for n, b in every.items()}
        phases = phases_lib.of_steps(own, calls, first.traced)
        towers = phases_lib.per_tower(every)
    elif len(spans):
        towers, busy = phases_lib.of_spans(spans, len(names))
        phases = {"a tower's step": float(np.nanmedian(towers["step"]))}
    else:
        phases = phases_lib.of_one_device(calls)
        missing = _why(model, config, len(calls.begins))
    traces = calls.have(first.traced)
    kind = None if config is None else type(config.strategy)
    measured = Measured(
        phases,
        towers.get("compute", towers.get("step", np.empty(0))),
        names,
        strategy="" if kind is None else kind.__name__,
        options=() if kind is None else _parameters(kind),
        updates=getattr(config and config.strategy, "updates", ""),
        steps_per_execution=model.steps_per_execution,
        cores=_cores(config),
        towers=len(first.devices),
        ranks=len(ranks),
        traces=(
            int(traces.sum()),
            float((calls.returned - calls.begins)[traces].sum()),
        ),
        busy=busy,
    )
    steps = len(stamps) or len(spans) or len(calls.begins)
    return Summary(measured, towers, steps, missing)


def _why(model: keras.Model, config: TowerConfig | None, calls: int) -> str:
    """Why no phases were measured; empty if that is no wonder."""
    if config is None or not calls:
        return ""
    why = f"{config.name} runs them in a way that it does not know"
    if model.run_eagerly:
        why = "they run eagerly: compile the model without run_eagerly=True"
    return (
        f"Timeline has not measured the steps of model {model.name!r}, because "
        f"{why}. The trace has only the calls of Keras's loop."
    )


def _parameters(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _cores(config: TowerConfig | None) -> int | None:
    if config is None or not devices_lib.all_on_host(config.devices):
        return None
    return usable_cores()
