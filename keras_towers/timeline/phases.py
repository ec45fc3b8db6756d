"""From the times of marks to the phases of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# What a tower does in a step, in order.
OF_TOWERS = ("compute", "wait", "reduction", "update")
# What a step consists of: between its phases on towers and around them.
OF_STEPS = ("input", *OF_TOWERS, "rest", "callbacks")


class Took(NamedTuple):
    """Seconds that a phase takes of a step: over all steps, and of calls."""

    mean: float
    median: float


class Calls(NamedTuple):
    """The times of C calls of the train function, in seconds since 1970."""

    begins: np.ndarray
    # NaN where callbacks run in another thread.
    ends: np.ndarray
    # When all callbacks had run.
    nexts: np.ndarray

    @property
    def returned(self) -> np.ndarray:
        """When the train function had returned, as far as is known."""
        return np.where(np.isnan(self.ends), self.nexts, self.ends)

    def at(self, moments: np.ndarray) -> np.ndarray:
        """The indices of the calls that run at given moments; -1: none yet."""
        return np.searchsorted(self.begins, moments, side="right") - 1

    def have(self, moments: np.ndarray) -> np.ndarray:
        """Whether each call has one of the moments in it."""
        return np.isin(np.arange(len(self.begins)), self.at(moments))


def of_towers(stamps: np.ndarray) -> dict[str, np.ndarray]:
    """Return begins and ends, [steps, towers, updates, 2], of ``OF_TOWERS``."""
    begun, computed, reduced, updated = np.moveaxis(stamps, -1, 0)
    last = latest(computed, axis=1, keepdims=True)
    # Sums that only one tower reads are those of all.
    sums = latest(reduced, axis=1, keepdims=True)
    sums = np.maximum(np.where(np.isnan(reduced), sums, reduced), last)
    starts = np.full_like(begun, np.nan)
    starts[..., 0] = begun[..., 0]
    for update in range(1, starts.shape[2]):
        # What another optimizer needs is computed after the last update.
        before = [of[..., update - 1] for of in (computed, sums, updated)]
        starts[..., update] = latest(np.stack(before), axis=0)
    bounds = {
        "compute": (starts, computed),
        "wait": (computed, last),
        "reduction": (last, sums),
        "update": (np.where(np.isnan(updated), np.nan, sums), updated),
    }
    # NaN where a tower was in no such phase.
    return {
        name: np.stack(
            np.broadcast_arrays(begin, np.maximum(begin, end)), axis=-1
        )
        for name, (begin, end) in bounds.items()
    }


class Steps(NamedTuple):
    """Positions of S steps in the calls of the train function; -1: in none."""

    call: np.ndarray
    ready: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


def in_calls(phases: dict[str, np.ndarray], calls: Calls) -> Steps:
    """Find the call of each step, from the phases of this rank's towers."""
    every = np.stack([phases[name] for name in OF_TOWERS])
    begins = -latest(-every[..., 0], axis=(0, 2, 3))
    ends = latest(every[..., 1], axis=(0, 2, 3))
    call = calls.at(begins)
    # A callback may train a step, too.
    returned = calls.returned[call] if len(calls.begins) else begins
    call = np.where(begins <= returned, call, -1)
    goes_on = np.r_[False, call[1:] == call[:-1]][: len(call)]
    before = np.r_[np.nan, ends[:-1]][: len(call)]
    called = calls.begins[call] if len(calls.begins) else begins
    ready = np.minimum(np.where(goes_on, before, called), begins)
    return Steps(call, ready, begins, ends)


def settled(steps: Steps, calls: Calls, traced: np.ndarray) -> np.ndarray:
    """Choose the steps of calls that did not trace, if there are any."""
    inside = steps.call >= 0
    if not inside.any():
        return inside
    counts = inside & ~calls.have(traced)[steps.call]
    return counts if counts.any() else inside


def of_steps(
    phases: dict[str, np.ndarray], calls: Calls, traced: np.ndarray
) -> dict[str, Took]:
    """Return the seconds of ``OF_STEPS``, which together are a step.

    Computing and waiting, also for a core to begin on, are means over this
    rank's towers; of the other phases the longest one counts.
    """
    steps = in_calls(phases, calls)
    inside = settled(steps, calls, traced)
    if not inside.any():
        return {}
    call, total = steps.call[inside], len(calls.begins)
    numbers = np.bincount(call, minlength=total)
    last = np.zeros(total)
    np.maximum.at(last, call, steps.ends[inside])
    sums = {
        "input": np.bincount(call, (steps.begins - steps.ready)[inside], total),
        "rest": np.maximum(calls.returned - last, 0),
        "callbacks": calls.nexts - calls.returned,
    }
    for name in OF_TOWERS:
        spans = np.nansum(np.diff(phases[name])[inside, ..., 0], axis=2)
        together = name in ("compute", "wait")
        if name == "wait":
            began = phases["compute"][inside, :, 0, 0]
            spans += began - steps.begins[inside, np.newaxis]
        seconds = spans.mean(axis=1) if together else spans.max(axis=1)
        sums[name] = np.bincount(call, seconds, total)
    kept = numbers > 0
    return {name: _took(sums[name][kept], numbers[kept]) for name in OF_STEPS}


def of_one_device(calls: Calls, traced: np.ndarray) -> dict[str, Took]:
    """Return seconds of calls and callbacks, where no step is divided."""
    # A call that finds the end of the data does not return.
    done = ~np.isnan(calls.ends)
    fresh = calls.have(traced)
    if not fresh.any():
        # Whatever runs the steps has prepared the first one, unseen.
        fresh[:1] = True
    for wanted in (done & ~fresh, done, ~fresh):
        if wanted.any():
            calls = Calls(*(times[wanted] for times in calls))
            break
    if not len(calls.begins):
        return {}
    return {
        "step": _took(calls.returned - calls.begins),
        "callbacks": _took(calls.nexts - calls.returned),
    }


def _took(seconds: np.ndarray, steps: np.ndarray | int = 1) -> Took:
    """Measure calls with numbers of steps."""
    each = seconds / steps
    mean = seconds.sum() / np.broadcast_to(steps, seconds.shape).sum()
    return Took(float(mean), float(np.median(each)))


def of_spans(
    spans: np.ndarray, towers: int
) -> tuple[dict[str, Took], dict[str, np.ndarray]]:
    """Summarise the steps of towers that have no step in common.

    Args:
        spans: tower, begin and end of each step. The first step of a tower may
            be traced and does not count.
        towers: how many there are.
    """
    seconds = spans[:, 2] - spans[:, 1]
    of_tower = [seconds[spans[:, 0] == tower] for tower in range(towers)]
    later = [steps[len(steps) > 1 :] for steps in of_tower]
    means = [steps.mean() if len(steps) else np.nan for steps in later]
    took = {"a tower's step": _took(np.concatenate(later))}
    return took, {"step": np.array(means)}


def per_tower(phases: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mean seconds of each tower in each phase, over all steps."""
    found = {}
    for name, bounds in phases.items():
        seconds = np.diff(bounds, axis=-1)[..., 0]
        there = ~np.isnan(seconds).all(axis=(0, 2))
        sums = np.nansum(seconds, axis=2)
        found[name] = np.where(there, np.mean(sums, axis=0), np.nan)
    return found


def latest(times: np.ndarray, **axes: Any) -> np.ndarray:
    """The maximum without NaN; NaN where there is nothing else."""
    return np.fmax.reduce(times, initial=np.nan, **axes)
