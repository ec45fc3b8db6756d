"""What was measured: the table of phases, and one line of advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers import devices as devices_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.system import usable_cores
from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline.phases import Calls, Took
from keras_towers.timeline.recorded import Host, OfRank, joined, rows_of

# Of more towers only the slowest are shown.
_SHOWN = 16
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
# A model is traced for whole batches and, once more, for any other size.
_TRACES = 2
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
    """Measurements of a ``fit``, and its conditions; times are in seconds.

    Attributes:
        phases: what each phase takes of a step.
        towers: names of the towers of all ranks.
        of_towers: mean of each tower, by phase.
        local_towers: number of towers of this process.
        cores: that these share; None: they are on accelerators.
        traces: number of calls that traced the step.
        steps: number of steps that are summarised.
        all_steps: number of all steps.
        missing: which measurements are missing, and why; empty: none.
    """

    phases: Mapping[str, Took]
    towers: Sequence[str] = ()
    of_towers: Mapping[str, np.ndarray] = dataclasses.field(
        default_factory=dict
    )
    local_towers: int = 1
    cores: int | None = None
    traces: int = 0
    steps: int = 0
    all_steps: int = 0
    missing: str = ""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(took.mean for took in self.phases.values())

    def share(self, phase: str) -> float:
        """The fraction of a step that a phase takes."""
        mean = self.phases[phase].mean if phase in self.phases else 0.0
        return mean / self.total if self.total else 0.0


def summarise(
    ranks: Sequence[OfRank],
    host: Host,
    model: keras.Model,
    config: TowerConfig | None,
) -> Summary:
    """Summarise the measurements of ranks with the same steps, on one clock."""
    first, calls = ranks[0], Calls(*ranks[0].calls)
    stamps = joined(ranks)
    spans = np.concatenate([rank.spans for rank in ranks])
    names = [name for (_, row), name in sorted(rows_of(ranks).items()) if row]
    of_towers: dict[str, np.ndarray] = {}
    missing = ""
    if len(stamps):
        bounds = phases_lib.of_towers(stamps)
        # Its own towers waited for those of other ranks, too.
        local = {n: b[:, : len(first.devices)] for n, b in bounds.items()}
        phases = phases_lib.of_steps(local, calls, first.traced)
        steps = phases_lib.in_calls(local, calls)
        count = phases_lib.settled(steps, calls, first.traced)
        if phases:
            of_towers = phases_lib.per_tower(
                {name: of_phase[count] for name, of_phase in bounds.items()}
            )
    elif len(spans):
        phases, of_towers = phases_lib.of_spans(spans, len(names))
    else:
        phases = phases_lib.of_one_device(calls, first.traced)
        if config is not None and len(calls.begins):
            missing = _why_missing(model, config)
    cores = None
    if config is not None and devices_lib.all_on_host(config.devices):
        cores = usable_cores()
    number = len(stamps) or len(spans) or len(calls.begins)
    return Summary(
        phases,
        names,
        of_towers,
        local_towers=len(first.devices),
        cores=cores,
        traces=host.traces,
        steps=number,
        all_steps=first.first_step + len(stamps) or first.first_call + number,
        missing=missing,
    )


def _why_missing(model: keras.Model, config: TowerConfig) -> str:
    why = f"{config.name} runs them in a way that it does not know"
    if model.run_eagerly:
        why = "they run eagerly: compile the model without run_eagerly=True"
    return (
        f"Timeline has not measured the steps of model {model.name!r}, because "
        f"{why}. The trace has only the calls of Keras's loop."
    )


def show(console: Console, title: str, summary: Summary, advice: str) -> None:
    """Print the phases of a step, those of each tower, and advice."""
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    if summary.phases:
        console.print(_table_of_phases(summary))
    if len(summary.towers) > 1 and summary.of_towers:
        console.print(_table_of_towers(summary))
    line = advice or "nothing stands out."
    console.print(line, highlight=False, markup=False)


def _table_of_phases(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("phase")
    for title in ("mean ms", "median ms", "share"):
        table.add_column(title, justify="right")
    for name, took in summary.phases.items():
        share = f"{summary.share(name):.0%}"
        table.add_row(name, _ms(took.mean), _ms(took.median), share)
    table.add_section()
    table.add_row("a step", _ms(summary.total))
    return table


def _table_of_towers(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("tower")
    shown = {n: v for n, v in summary.of_towers.items() if np.isfinite(v).any()}
    for name in shown:
        table.add_column(f"{name} ms", justify="right")
    slowest = np.argsort(-next(iter(shown.values())))[:_SHOWN]
    for tower in sorted(map(int, slowest)):
        cells = [_ms(float(seconds[tower])) for seconds in shown.values()]
        table.add_row(summary.towers[tower], *cells)
    if len(summary.towers) > _SHOWN:
        table.caption = f"the slowest {_SHOWN} of {len(summary.towers)}"
    return table


def _ms(seconds: float) -> str:
    return "" if np.isnan(seconds) else f"{1e3 * seconds:.2f}"


def advise(summary: Summary) -> str:
    """Return what to change first; empty if nothing stands out."""
    phases = [
        phase
        for phase, least in _STANDS_OUT.items()
        if summary.share(phase) >= least
    ]
    if phases:
        phase = max(phases, key=summary.share)
        milliseconds = 1e3 * summary.phases[phase].mean
        share = f"{summary.share(phase):.0%} of a step ({milliseconds:.2f} ms)"
        if phase == "wait":
            return _advise_on_waiting(summary, share)
        return _ADVICE[phase].format(share)
    if summary.traces > _TRACES:
        return (
            f"{summary.traces} calls traced the step: each new shape of a "
            "batch is a trace. Give batches few shapes: batch(..., "
            "drop_remainder=True), padding to a few lengths."
        )
    if "step" in summary.phases and len(summary.towers) <= 1:
        return (
            "the steps are not divided into phases, because they do not run "
            "on several towers: TowerStrategy takes all visible devices, and "
            "keras_towers.virtual_towers(n) makes n of a CPU."
        )
    return ""


def _advise_on_waiting(summary: Summary, share: str) -> str:
    waiting = f"towers wait for one another for {share}"
    compute = summary.of_towers.get("compute", np.empty(0))
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
    if summary.cores is not None and summary.local_towers > summary.cores:
        return (
            f"{waiting}: {summary.local_towers} towers on {summary.cores} "
            "core(s) compute in turn. More towers than cores only add work."
        )
    return (
        f"{waiting}, now for one, now for another: parts of one batch take "
        "different times. Put examples of equal length into a batch, or use "
        "AsyncTowerStrategy, where no tower waits."
    )
