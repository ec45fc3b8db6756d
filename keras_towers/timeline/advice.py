"""What to change, as measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

# Fractions of a step from which on a phase stands out.
_INPUT = 0.2
_CALLBACKS = 0.1
_WAIT = 0.15
_REDUCTION = 0.3
_UPDATE = 0.3
# How much longer than the others a slow tower computes.
_SLOW = 1.25
# Seconds that TensorFlow takes at most to start a step whose batch is there.
_START_S = 3e-3
# A model is traced for whole batches and, once more, for any other size.
_TRACES = 2
# The fraction of the time that a tower by itself is busy.
_BUSY = 0.8


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured, and of what.

    Attributes:
        phases: seconds that each phase takes of a step.
        compute: seconds that each tower computes in a step, or its own steps
            take; empty if not measured.
        names: what the towers are called.
        strategy: the class name of the strategy.
        options: the arguments that its class takes.
        updates: who updates the weights.
        steps_per_execution: as the model was compiled.
        cores: on how many cores the towers of a process run; None: on
            accelerators.
        towers: number of towers of a process.
        ranks: number of processes.
        traces: how many calls traced the step, and how long they took together
            in seconds.
        busy: the fraction of the time that towers without a common step were in
            one; None: they have a common step.
    """

    phases: dict[str, float]
    compute: np.ndarray
    names: Sequence[str] = ()
    strategy: str = "TowerStrategy"
    options: Sequence[str] = ()
    updates: str = "once"
    steps_per_execution: int = 1
    cores: int | None = None
    towers: int = 1
    ranks: int = 1
    traces: tuple[int, float] = (0, 0.0)
    busy: float | None = None

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.phases.values())

    def share(self, phase: str) -> float:
        """The fraction of a step that a phase takes."""
        return self.phases.get(phase, 0.0) / self.total if self.total else 0.0


def advise(measured: Measured) -> list[str]:
    """What to change, the most important first; empty: nothing stands out.

    Example:
        >>> phases = {"compute": 0.01, "callbacks": 0.03}
        >>> advise(Measured(phases, np.array([0.01, 0.01])))
        ['callbacks take 75% of a step (30.00 ms): ...']
    """
    found: list[tuple[float, str]] = []
    for kind in (_input, _callbacks, _wait, _reduction, _update, _idle):
        found += kind(measured)
    lines = [line for _, line in sorted(found, key=lambda f: -f[0])]
    return [*lines, *_cores(measured), *_traces(measured), *_one(measured)]


Advice = Iterator[tuple[float, str]]


def _said(measured: Measured, phase: str) -> str:
    seconds, share = measured.phases[phase], measured.share(phase)
    return f"{share:.0%} of a step ({1e3 * seconds:.2f} ms)"


def _input(measured: Measured) -> Advice:
    if (share := measured.share("input")) < _INPUT:
        return
    options = [
        ".prefetch(tf.data.AUTOTUNE) at the end of the dataset, and "
        "num_parallel_calls=tf.data.AUTOTUNE in its map(), read ahead"
    ]
    if measured.steps_per_execution == 1:
        start = "compile(..., steps_per_execution=16) starts 16 steps at once"
        slow = measured.phases["input"] > _START_S
        options.insert(len(options) if slow else 0, start)
    yield (
        share,
        f"a step waits for its input for {_said(measured, 'input')}: "
        f"{'; '.join(options)}.",
    )


def _callbacks(measured: Measured) -> Advice:
    if (share := measured.share("callbacks")) < _CALLBACKS:
        return
    yield (
        share,
        f"callbacks take {_said(measured, 'callbacks')}: do their work at the "
        "end of an epoch, show progress with verbose=2, or run them less often "
        "by compile(..., steps_per_execution=16).",
    )


def _wait(measured: Measured) -> Advice:
    share, compute = measured.share("wait"), measured.compute
    if share < _WAIT or len(compute) < 2:
        return
    said = f"towers wait for one another for {_said(measured, 'wait')}"
    slow = int(np.argmax(compute))
    times = compute[slow] / np.median(np.delete(compute, slow))
    if times >= _SLOW:
        yield (
            share,
            f"{said}: {measured.names[slow]} computes {times:.1f} times as "
            "long as the others. Leave it out, if its device is slower or has "
            "other work; with AsyncTowerStrategy no tower waits.",
        )
    elif not _shares_cores(measured):
        yield (
            share,
            f"{said}, now for one, now for another: parts of one batch take "
            "different times. Put examples of equal length into a batch, or "
            "use AsyncTowerStrategy, where no tower waits.",
        )


def _reduction(measured: Measured) -> Advice:
    if (share := measured.share("reduction")) < _REDUCTION:
        return
    more = []
    if measured.ranks > 1 and "compression" in measured.options:
        more.append(f'{measured.strategy}(compression="bf16") exchanges half')
    if measured.towers > 1 and "packer" in measured.options:
        more.append(
            f"{measured.strategy}(packer=True) sums fewer, larger buffers"
        )
    told = "".join(f"; {option}" for option in more)
    yield (
        share,
        f"the reduction of gradients takes {_said(measured, 'reduction')}: a "
        f"larger batch_size computes longer for each of them{told}.",
    )


def _update(measured: Measured) -> Advice:
    if (share := measured.share("update")) < _UPDATE:
        return
    on_host = measured.cores is not None
    other = {"once": "each", "each": "once"}.get(measured.updates)
    better = other == ("once" if on_host else "each")
    more = ""
    if better and "updates" in measured.options:
        more = f'; try {measured.strategy}(updates="{other}")'
    yield (
        share,
        f"the optimizer's update takes {_said(measured, 'update')}: a larger "
        "batch_size updates less often, and keras.optimizers.SGD passes over "
        f"the weights once, others several times{more}.",
    )


def _idle(measured: Measured) -> Advice:
    if measured.busy is None or measured.busy >= _BUSY:
        return
    yield (
        1 - measured.busy,
        f"towers are idle for {1 - measured.busy:.0%} of the time, because "
        "they get no batch: end the dataset with .prefetch(tf.data.AUTOTUNE), "
        "use larger batches, or do less in callbacks behind a batch.",
    )


def _shares_cores(measured: Measured) -> bool:
    return measured.cores is not None and measured.towers > measured.cores


def _cores(measured: Measured) -> Iterator[str]:
    if _shares_cores(measured):
        cores = measured.cores
        yield (
            f"{measured.towers} towers share {cores} "
            f"core{'s' * (cores != 1)}, so they compute in turn: more towers "
            "than cores only add work."
        )


def _traces(measured: Measured) -> Iterator[str]:
    count, seconds = measured.traces
    if count > _TRACES:
        yield (
            f"{count} calls traced the step and took {seconds:.1f} s: each new "
            "shape of a batch is a trace. Give batches few shapes: "
            "batch(..., drop_remainder=True), padding to a few lengths."
        )


def _one(measured: Measured) -> Iterator[str]:
    if "step" in measured.phases:
        yield (
            "the steps are not divided into phases, because they do not run "
            "on several towers: TowerStrategy takes all visible devices, and "
            "keras_towers.virtual_towers(n) makes n of a CPU."
        )
