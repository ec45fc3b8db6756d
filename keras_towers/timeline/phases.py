"""From the times of marks to the phases of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# What a tower does in a step, in order.
TOWER_PHASES = ("compute", "wait", "reduction", "update")


class Calls(NamedTuple):
    """The calls of the train function; times are in seconds since 1970.

    Attributes:
        begins: when each began.
        returned: when it returned; NaN where callbacks run in another thread.
        ended: when Keras went on to the next call, or to the epoch's end.
        traced: 1 if it traced the step, else 0.
    """

    begins: np.ndarray
    returned: np.ndarray
    ended: np.ndarray
    traced: np.ndarray

    @property
    def returns(self) -> np.ndarray:
        """When the train function had returned, as far as is known."""
        return np.where(np.isnan(self.returned), self.ended, self.returned)


def tower_phases(stamps: np.ndarray) -> dict[str, np.ndarray]:
    """Return begin and end of each phase: [steps, towers, 2].

    They are NaN where a tower was in no such phase.
    """
    begun, computed, reduced, updated = np.moveaxis(stamps, -1, 0)
    last = latest(computed, axis=1, keepdims=True)
    # Sums that only one tower reads are those of all.
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
        call: the index of each step's call; -1: in none.
        ready: when Keras's loop was ready for it.
        begins: when the first tower began.
        ends: when the last one ended.
        counts: whether it does: not if its call traced, unless all did.
    """

    call: np.ndarray
    ready: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    counts: np.ndarray


def find_steps(phases: dict[str, np.ndarray], calls: Calls) -> Steps:
    """Find the call of each step, from the phases of this rank's towers."""
    bounds = np.stack([phases[name] for name in TOWER_PHASES])
    begins = -latest(-bounds[..., 0], axis=(0, 2))
    ends = latest(bounds[..., 1], axis=(0, 2))
    call = np.searchsorted(calls.begins, begins, side="right") - 1
    # A callback may train a step, too.
    call = np.where(begins <= calls.returns[call], call, -1)
    goes_on = np.diff(call, prepend=-2) == 0
    # A call with several steps is ready for the next when one has ended.
    before = np.roll(ends, 1)
    ready = np.minimum(np.where(goes_on, before, calls.begins[call]), begins)
    inside = call >= 0
    counts = inside & (calls.traced[call] == 0)
    counts = counts if counts.any() else inside
    return Steps(call, ready, begins, ends, counts)


def step_seconds(
    phases: dict[str, np.ndarray], calls: Calls
) -> dict[str, np.ndarray]:
    """Return the seconds that each step that counts takes in each phase.

    Computing and waiting, also for a core to begin on, are means over this
    rank's towers; of the other phases the longest one counts. What follows the
    steps of a call is shared equally among them.
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


def call_seconds(calls: Calls) -> dict[str, np.ndarray]:
    """Return the seconds of calls and callbacks, where no step is divided."""
    if not len(calls.begins):
        return {}
    # A call that finds the end of the data does not return, and whatever runs
    # the steps prepares the first one.
    done = ~np.isnan(calls.returned)
    later = np.arange(len(done)) > 0
    for count in (done & later, later):
        if count.any():
            calls = Calls(*(values[count] for values in calls))
            break
    return {
        "step": calls.returns - calls.begins,
        "callbacks": calls.ended - calls.returns,
    }


def span_seconds(spans: np.ndarray) -> dict[str, np.ndarray]:
    """Return the seconds of the steps of towers that have none in common.

    A tower's first step may be traced, and does not count if there are others.
    """
    later = []
    for tower in np.unique(spans[:, 0]):
        _, begins, ends = spans[spans[:, 0] == tower].T
        seconds = ends - begins
        later.append(seconds[1:] if len(seconds) > 1 else seconds)
    return {"a tower's step": np.concatenate(later)}


def latest(times: np.ndarray, **axes: Any) -> np.ndarray:
    """The maximum without NaN; NaN where there is nothing else."""
    return np.fmax.reduce(times, initial=np.nan, **axes)
