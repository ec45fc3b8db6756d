"""Measurements of all ranks."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.fit.context import marks
from keras_towers.fit.context import tower as tower_lib
from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline.host import Host

HOST = 0
"""The row of a rank's host in the trace."""


@dataclasses.dataclass
class OfRank:
    """Measurements of one rank; all times are in seconds since 1970."""

    rank: int
    machine: str
    devices: list[str]
    first_step: int
    first_call: int
    # As fit.context.marks.Recorder.steps returns them.
    stamps: np.ndarray
    # Towers, begins and ends of steps that are a tower's own: [steps, 3].
    spans: np.ndarray
    # The begins of the calls that traced the step.
    traced: np.ndarray
    # Of the train function: [3, calls].
    calls: np.ndarray
    # Names, begins and ends of validation and callbacks.
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
        stamps, calls = recorder.steps(), np.stack(host.calls())
        if np.isnan(stamps[..., marks.POINTS.index("computed")]).all():
            # Gradients of these steps go other ways than through marks.
            stamps = stamps[:0]
        return cls(
            rank,
            platform.node(),
            [tower_lib.short_name(device) for device in devices],
            recorder.count - len(stamps),
            host.count - calls.shape[1],
            stamps,
            np.array(recorder.spans, np.float64).reshape(-1, 3),
            np.array(host.traced, np.float64),
            calls,
            [list(other) for other in host.others],
        )

    def keep(self, begin: int, end: int) -> None:
        """Keep the steps from one, counted from the first, to another."""
        first, self.first_step = self.first_step, begin
        self.stamps = self.stamps[max(0, begin - first) : max(0, end - first)]

    def shift(self, seconds: float) -> None:
        """Set the rank's clock back."""
        self.stamps = self.stamps - seconds
        self.spans = self.spans - [0, seconds, seconds]
        self.traced = self.traced - seconds
        self.calls = self.calls - seconds
        self.others = [[n, b - seconds, e - seconds] for n, b, e in self.others]


def align(ranks: Sequence[OfRank]) -> None:
    """Cut ranks to the steps of all, and set them to the clock of rank 0."""
    begin = max(of.first_step for of in ranks)
    end = min(of.first_step + len(of.stamps) for of in ranks)
    for of in ranks:
        of.keep(begin, end)
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
