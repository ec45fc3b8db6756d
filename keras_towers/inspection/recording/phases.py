"""The phases of a step, from what the ranks have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keras_towers.inspection.recording.recording import (
    RankRecording,
    join_stamps,
    latest,
)

# The phases of a tower's step, in order.
TOWER_PHASES = ("compute", "wait", "reduction", "update")

Phases = Mapping[str, np.ndarray]
"""Seconds of each step, by phase."""


def compute_phases(ranks: Sequence[RankRecording]) -> tuple[Phases, np.ndarray]:
    """Return the phases of a step on aligned ranks.

    Returns:
        The phases, and the mean seconds that each tower of all ranks computes;
        empty if steps are not divided.
    """
    stamps, calls = join_stamps(ranks), StepTimes(*ranks[0].calls)
    spans = np.concatenate([rank.spans for rank in ranks])
    if len(spans):
        return span_seconds(spans), np.empty(0)
    if not len(stamps):
        return call_seconds(calls), np.empty(0)
    bounds = tower_phases(stamps)
    # The towers of this rank also waited for towers of other ranks.
    local = {n: b[:, : len(ranks[0].devices)] for n, b in bounds.items()}
    counts = find_steps(local, calls).counts
    compute = np.diff(bounds["compute"])[counts, :, 0]
    compute = np.nan_to_num(compute).mean(axis=0)
    return step_seconds(local, calls), compute


class StepTimes(NamedTuple):
    """The times of calls of the train function, in seconds since 1970.

    Attributes:
        begins: when each began.
        returned: when it returned; NaN where callbacks run in another thread.
        ended: when the next call of its epoch began; after the last one, when
            its callbacks returned.
        traced: 1 if it traced the step, else 0.
    """

    begins: np.ndarray
    returned: np.ndarray
    ended: np.ndarray
    traced: np.ndarray

    @property
    def returns(self) -> np.ndarray:
        """The times at which the train function returned, or else ended."""
        return np.where(np.isnan(self.returned), self.ended, self.returned)


def between_epochs(calls: StepTimes) -> np.ndarray:
    """Return the seconds from the last call of each epoch to the next one."""
    seconds = calls.begins[1:] - calls.ended[:-1]
    return seconds[seconds > 0]


def tower_phases(stamps: np.ndarray) -> dict[str, np.ndarray]:
    """Return begin and end of each phase: [steps, towers, 2].

    NaN: the tower skipped this phase.
    """
    begun, computed, reduced, updated = np.moveaxis(stamps, -1, 0)
    last = latest(computed, axis=1, keepdims=True)
    # If only one tower reads the sums, its time counts for all towers.
    sums = latest(reduced, axis=1, keepdims=True)
    sums = np.maximum(np.where(np.isnan(reduced), sums, reduced), last)
    bounds = {
        "compute": (begun, computed),
        "wait": (computed, last),
        "reduction": (last, sums),
        "update": (np.where(np.isnan(updated), np.nan, sums), updated),
    }
    return {
        name: np.stack(
            np.broadcast_arrays(begin, np.maximum(begin, end)), axis=-1
        )
        for name, (begin, end) in bounds.items()
    }


class Steps(NamedTuple):
    """Steps of towers, in the calls of the train function.

    Attributes:
        call: the index of each step's call; -1: outside of all calls.
        ready: when Keras's loop was ready for it.
        begins: when the first tower began.
        ends: when the last one ended.
        counts: whether the step counts: it does unless its call traced, or if
            all calls traced.
    """

    call: np.ndarray
    ready: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    counts: np.ndarray


def find_steps(phases: dict[str, np.ndarray], calls: StepTimes) -> Steps:
    """Find the call of each step, from the phases of this rank's towers."""
    bounds = np.stack([phases[name] for name in TOWER_PHASES])
    begins = -latest(-bounds[..., 0], axis=(0, 2))
    ends = latest(bounds[..., 1], axis=(0, 2))
    call = np.searchsorted(calls.begins, begins, side="right") - 1
    # A callback may train a step, too.
    call = np.where(begins <= calls.returns[call], call, -1)
    same_call = np.diff(call, prepend=-2) == 0
    # Within a call, the next step is ready when the one before ends.
    before = np.roll(ends, 1)
    ready = np.minimum(np.where(same_call, before, calls.begins[call]), begins)
    inside = call >= 0
    counts = inside & (calls.traced[call] == 0)
    counts = counts if counts.any() else inside
    return Steps(call, ready, begins, ends, counts)


def step_seconds(
    phases: dict[str, np.ndarray], calls: StepTimes
) -> dict[str, np.ndarray]:
    """Return the seconds of each phase, for every step that counts.

    Computing and waiting (including for a free core) are averaged over this
    rank's towers; for other phases the slowest tower counts. Time after the
    last step of a call is divided equally among the call's steps.
    """
    steps = find_steps(phases, calls)
    call, begins = steps.call[steps.counts], steps.begins[steps.counts]
    if not len(call):
        return {}
    numbers = np.maximum(np.bincount(call, minlength=len(calls.begins)), 1)
    last = np.zeros(len(calls.begins))
    np.maximum.at(last, call, steps.ends[steps.counts])
    seconds = {"input": begins - steps.ready[steps.counts]}
    for name in TOWER_PHASES:
        spans = np.nan_to_num(np.diff(phases[name])[steps.counts, :, 0])
        if name == "wait":
            spans += phases["compute"][steps.counts, :, 0] - begins[:, None]
        is_mean = name in ("compute", "wait")
        seconds[name] = spans.mean(axis=1) if is_mean else spans.max(axis=1)
    rest = np.maximum(calls.returns - last, 0)
    seconds["rest"] = (rest / numbers)[call]
    callbacks = calls.ended - calls.returns
    seconds["callbacks"] = (callbacks / numbers)[call]
    return seconds


def call_seconds(calls: StepTimes) -> dict[str, np.ndarray]:
    """Return the seconds of calls and callbacks, if no step is divided."""
    if not len(calls.begins):
        return {}
    # A call that finds the end of the data does not return, and the first call
    # includes preparations.
    done = ~np.isnan(calls.returned)
    later = np.arange(len(done)) > 0
    for count in (done & later, later):
        if count.any():
            calls = StepTimes(*(values[count] for values in calls))
            break
    return {
        "step": calls.returns - calls.begins,
        "callbacks": calls.ended - calls.returns,
    }


def span_seconds(spans: np.ndarray) -> dict[str, np.ndarray]:
    """Return the seconds of steps if towers have no common step.

    A tower's first step may be traced, and counts only if there are no more.
    """
    later = []
    for tower in np.unique(spans[:, 0]):
        _, begins, ends = spans[spans[:, 0] == tower].T
        seconds = ends - begins
        later.append(seconds[1:] if len(seconds) > 1 else seconds)
    return {"a tower's step": np.concatenate(later)}
