"""Prints the table of phases, and advice about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.inspection.recording.phases import Phases


def print_table(
    console: Console,
    title: str,
    phases: Phases,
    between: np.ndarray,
    advice: str,
) -> None:
    """Print the phases of a step, the seconds between epochs, and advice."""
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    if phases:
        table = Table("phase", box=box.SIMPLE)
        for heading in ("mean ms", "median ms", "share"):
            table.add_column(heading, justify="right")
        total = sum(seconds.mean() for seconds in phases.values())
        for name, seconds in phases.items():
            share = f"{seconds.mean() / (total or 1):.0%}"
            table.add_row(name, *_mean_and_median(seconds), share)
        table.add_section()
        table.add_row("a step", f"{1e3 * total:.2f}")
        if len(between):
            table.add_row("between epochs", *_mean_and_median(between))
        console.print(table)
    line = advice or "nothing stands out."
    console.print(line, highlight=False, markup=False)


def _mean_and_median(seconds: np.ndarray) -> tuple[str, str]:
    return f"{1e3 * seconds.mean():.2f}", f"{1e3 * np.median(seconds):.2f}"


# The fraction of a step from which a phase stands out.
_STANDS_OUT = {
    "input": 0.2,
    "callbacks": 0.1,
    "wait": 0.15,
    "reduction": 0.3,
    "update": 0.3,
}
# A slow tower computes longer than the median by this factor.
_SLOW = 1.25
# On a busy machine a tower may seem to compute in no time at all.
_TICK_S = 1e-6
_ADVICE = {
    "input": "a step waits for its input for {}: with arrays or generators, "
    "start 16 steps at once by compile(..., steps_per_execution=16); with a "
    "dataset, read ahead by .prefetch(tf.data.AUTOTUNE) at its end; with a "
    "keras.utils.PyDataset, by workers=4.",
    "callbacks": "callbacks take {}: do their work at the end of an epoch, "
    "show progress with verbose=2, or run them less often by compile(..., "
    "steps_per_execution=16).",
    "reduction": "the reduction of gradients takes {}: with a larger "
    "batch_size, towers compute longer for each reduction.",
    "update": "the optimizer's update takes {}: with a larger batch_size, "
    "there are fewer updates.",
}


def advise(
    phases_ms: Mapping[str, float],
    towers: Sequence[str],
    compute: np.ndarray,
    eager: str,
) -> str:
    """Return what to change first; empty if nothing stands out.

    Args:
        phases_ms: mean milliseconds of each phase.
        towers: names of the towers of all ranks.
        compute: mean seconds that each tower computes; empty if unknown.
        eager: what makes the model run eagerly; empty: nothing does.
    """
    if "step" in phases_ms and eager:
        return (
            "the steps are not divided into phases, because they run eagerly: "
            f"leave out {eager}."
        )
    total = sum(phases_ms.values()) or 1
    high = {
        phase: phases_ms[phase]
        for phase, least in _STANDS_OUT.items()
        if phases_ms.get(phase, 0) >= least * total
    }
    if high:
        phase = max(high, key=high.__getitem__)
        share = f"{high[phase] / total:.0%} of a step ({high[phase]:.2f} ms)"
        if phase == "wait":
            return _advise_on_waiting(towers, compute, share)
        return _ADVICE[phase].format(share)
    if "step" in phases_ms and len(towers) <= 1:
        return (
            "the steps are not divided into phases, because they do not run "
            "on several towers: TowerStrategy takes all visible devices, and "
            "keras_towers.virtual_towers(n) makes n of a CPU."
        )
    return ""


def _advise_on_waiting(
    towers: Sequence[str], compute: np.ndarray, share: str
) -> str:
    waiting = f"towers wait for one another for {share}"
    if len(compute) > 1:
        slow = int(np.argmax(compute))
        median = max(float(np.median(np.delete(compute, slow))), _TICK_S)
        if compute[slow] >= _SLOW * median:
            return (
                f"{waiting}: {towers[slow]} computes "
                f"{compute[slow] / median:.1f} times as long as the others. If "
                "its device is slower or has other work, leave it out; with "
                "AsyncTowerStrategy no tower waits."
            )
    return (
        f"{waiting}, now for one, now for another: parts of one batch take "
        "different times, or towers share cores and compute in turn. Use no "
        "more towers than cores, put examples of equal length into a batch, or "
        "use AsyncTowerStrategy, where no tower waits."
    )
