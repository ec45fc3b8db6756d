"""What was measured: a table of the phases, and one line of advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline.recording import Recording, joined, tower_names

# Fractions of a step from which on a phase stands out.
_STANDS_OUT = {
    "input": 0.2,
    "callbacks": 0.1,
    "wait": 0.15,
    "reduction": 0.3,
    "update": 0.3,
}
# How much longer than the others a slow tower computes.
_SLOW = 1.25
# On a busy machine a tower may seem to compute in no time at all.
_TICK_S = 1e-6
_ADVICE = {
    "input": "a step waits for its input for {}: read ahead, by "
    ".prefetch(tf.data.AUTOTUNE) at the end of a dataset or workers=4 of a "
    "keras.utils.PyDataset, or start 16 steps at once by compile(..., "
    "steps_per_execution=16).",
    "callbacks": "callbacks take {}: do their work at the end of an epoch, "
    "show progress with verbose=2, or run them less often by compile(..., "
    "steps_per_execution=16).",
    "reduction": "the reduction of gradients takes {}: a larger batch_size "
    "computes longer for each of them.",
    "update": "the optimizer's update takes {}: a larger batch_size updates "
    "less often.",
}


@dataclasses.dataclass(frozen=True)
class Summary:
    """Measurements of a ``fit``, and its conditions.

    Attributes:
        phases: seconds of each step, by phase.
        which_steps: which steps these are, in words.
        towers: names of the towers of all ranks.
        compute: mean seconds that each of them computes; empty: not known.
        eager: whether the model is set to run eagerly.
    """

    phases: Mapping[str, np.ndarray]
    which_steps: str = ""
    towers: Sequence[str] = ()
    compute: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    eager: bool = False

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(float(seconds.mean()) for seconds in self.phases.values())

    def share(self, phase: str) -> float:
        """The fraction of a step that a phase takes."""
        if phase not in self.phases or not self.total:
            return 0.0
        return float(self.phases[phase].mean()) / self.total


def summarize(ranks: Sequence[Recording], eager: bool) -> Summary:
    """Summarize the measurements of aligned ranks."""
    first, stamps = ranks[0], joined(ranks)
    spans = np.concatenate([rank.spans for rank in ranks])
    compute = np.empty(0)
    if len(stamps):
        bounds = phases_lib.tower_phases(stamps)
        # Its own towers waited for those of other ranks, too.
        local = {n: b[:, : len(first.devices)] for n, b in bounds.items()}
        phases = phases_lib.step_seconds(local, first.loop)
        counts = phases_lib.find_steps(local, first.loop).counts
        if counts.any():
            seconds = np.diff(bounds["compute"])[counts, ..., 0]
            compute = np.nansum(seconds, axis=2).mean(axis=0)
    elif len(spans):
        phases = phases_lib.span_seconds(spans)
    else:
        phases = phases_lib.call_seconds(first.loop)
    kept = len(stamps) or len(spans) or first.calls.shape[1]
    total = first.first_step + len(stamps) or first.first_call + kept
    which = f"the last {kept} of {total} steps"
    if kept == total:
        which = f"{total} steps"
    return Summary(
        phases,
        which,
        tower_names(ranks),
        compute,
        eager,
    )


def show(console: Console, title: str, summary: Summary, advice: str) -> None:
    """Print the phases of a step, and advice."""
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    if summary.phases:
        table = Table("phase", box=box.SIMPLE)
        for heading in ("mean ms", "median ms", "share"):
            table.add_column(heading, justify="right")
        for name, seconds in summary.phases.items():
            mean, median = 1e3 * seconds.mean(), 1e3 * np.median(seconds)
            share = f"{summary.share(name):.0%}"
            table.add_row(name, f"{mean:.2f}", f"{median:.2f}", share)
        table.add_section()
        table.add_row("a step", f"{1e3 * summary.total:.2f}")
        console.print(table)
    line = advice or "nothing stands out."
    console.print(line, highlight=False, markup=False)


def advise(summary: Summary) -> str:
    """Return what to change first; empty if nothing stands out."""
    phases = [
        phase
        for phase, least in _STANDS_OUT.items()
        if summary.share(phase) >= least
    ]
    if "step" in summary.phases and summary.eager:
        return (
            "the steps are not divided into phases, because they run eagerly: "
            "compile the model without run_eagerly=True."
        )
    if phases:
        phase = max(phases, key=summary.share)
        milliseconds = 1e3 * summary.phases[phase].mean()
        share = f"{summary.share(phase):.0%} of a step ({milliseconds:.2f} ms)"
        if phase == "wait":
            return _advise_on_waiting(summary, share)
        return _ADVICE[phase].format(share)
    if "step" in summary.phases and len(summary.towers) <= 1:
        return (
            "the steps are not divided into phases, because they do not run "
            "on several towers: TowerStrategy takes all visible devices, and "
            "keras_towers.virtual_towers(n) makes n of a CPU."
        )
    return ""


def _advise_on_waiting(summary: Summary, share: str) -> str:
    waiting = f"towers wait for one another for {share}"
    compute = summary.compute
    if len(compute) > 1:
        slow = int(np.argmax(compute))
        others = max(float(np.median(np.delete(compute, slow))), _TICK_S)
        if compute[slow] >= _SLOW * others:
            return (
                f"{waiting}: {summary.towers[slow]} computes "
                f"{compute[slow] / others:.1f} times as long as the others. "
                "Leave it out, if its device is slower or has other work; with "
                "AsyncTowerStrategy no tower waits."
            )
    return (
        f"{waiting}, now for one, now for another: parts of one batch take "
        "different times, or towers share cores and compute in turn. Take no "
        "more towers than cores, put examples of equal length into a batch, or "
        "use AsyncTowerStrategy, where no tower waits."
    )
