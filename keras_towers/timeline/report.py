"""Tables of measurements, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.timeline.measured import Measured
from keras_towers.timeline.recorded import PARTS

# Of more towers only the slowest are shown.
_SHOWN = 16


def show(
    console: Console,
    title: str,
    measured: Measured,
    advice: Sequence[str],
) -> None:
    """Print the phases of a step, those of each tower, and advice."""
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    for line in _of_fit(measured):
        console.print(line, highlight=False, markup=False)
    if measured.phases:
        console.print(_phases(measured))
    if len(measured.names) > 1 and measured.of_towers:
        console.print(_towers(measured.names, measured.of_towers))
    for line in advice or ["nothing stands out."]:
        console.print(f"- {line}", highlight=False, markup=False)


def _of_fit(measured: Measured) -> Iterator[str]:
    for name, seconds in measured.seconds.items():
        if name == "steps":
            yield f"steps: {seconds:.2f} of {measured.whole:.2f} s of fit"
        elif seconds:
            what = f" ({PARTS[name]})" if PARTS[name] else ""
            yield f"{name}: {seconds:.2f} s{what}"


def _phases(measured: Measured) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("phase")
    table.add_column("mean ms", justify="right")
    table.add_column("median ms", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name, mean in measured.phases.items():
        share = f"{measured.share(name):.0%}"
        median = _ms(measured.medians.get(name, mean))
        rare = "every so often" if measured.is_rare(name) else ""
        table.add_row(name, _ms(mean), median, share, rare)
    table.add_section()
    table.add_row("a step", _ms(measured.total))
    return table


def _towers(names: Sequence[str], towers: Mapping[str, np.ndarray]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("tower")
    shown = {n: v for n, v in towers.items() if not np.isnan(v).all()}
    for name in shown:
        table.add_column(f"{name} ms", justify="right")
    slowest = np.argsort(-next(iter(shown.values())))[:_SHOWN]
    for tower in sorted(int(index) for index in slowest):
        cells = [_ms(float(v[tower])) for v in shown.values()]
        table.add_row(names[tower], *cells)
    if len(names) > _SHOWN:
        table.caption = f"the slowest {_SHOWN} of {len(names)}"
    return table


def _ms(seconds: float) -> str:
    return "" if np.isnan(seconds) else f"{1e3 * seconds:.2f}"


# Fractions of a step from which on a phase stands out.
_STANDS_OUT = {"input": 0.2, "callbacks": 0.1, "wait": 0.15}
_STANDS_OUT |= {"reduction": 0.3, "update": 0.3}
# Fractions of the time of epochs, likewise, and seconds that are worth a line.
_OF_EPOCHS = {"validation": 0.2, "ends of epochs": 0.1}
_LONG_S = 0.1
# How much longer than the others a slow tower computes.
_SLOW = 1.25
# On a busy machine a tower may seem to compute in no time at all.
_TICK_S = 1e-6
# Seconds that TensorFlow takes at most to start a step whose batch is there.
_START_S = 3e-3
# A model is traced for whole batches and, once more, for any other size.
_TRACES = 2
# The fraction of the time that a tower by itself is busy.
_BUSY = 0.8
# How to get the next batch before a step asks for it.
_SOONER = {
    "dataset": ".prefetch(tf.data.AUTOTUNE) at the end of the dataset, and "
    "num_parallel_calls=tf.data.AUTOTUNE in its map(), read ahead",
    "PyDataset": "workers=4 of keras.utils.PyDataset reads ahead, with "
    "use_multiprocessing=True if Python's own code is what takes the time, and "
    "a larger max_queue_size bridges single slow batches",
    "DataLoader": "num_workers=4 of the DataLoader reads ahead",
    "generator": "a generator is read by one thread; a keras.utils.PyDataset "
    "with workers=4, or a tf.data.Dataset with .prefetch(tf.data.AUTOTUNE), "
    "reads ahead",
}
_AT_ONCE = "compile(..., steps_per_execution=16) starts 16 steps at once"
_EPOCHS = {
    "validation": "validation takes {share} ({seconds} s): fit(..., "
    "validation_freq=5) does it less often, and a larger "
    "validation_batch_size in fewer steps.",
    "ends of epochs": "callbacks take {share} at their ends ({seconds} s): "
    "save and evaluate after every few epochs only, or make epochs longer by "
    "fit(..., steps_per_epoch=...).",
}


def advise(measured: Measured) -> list[str]:
    """Return what to change, the most important first."""
    steps = measured.share_of_epochs("steps") if measured.seconds else 1.0
    found = [
        (steps * measured.share(phase), line)
        for phase, least in _STANDS_OUT.items()
        if measured.share(phase) >= least
        if (line := _PHASES[phase](measured, _said(measured, phase)))
    ]
    if measured.busy is not None and measured.busy < _BUSY:
        idle = 1 - measured.busy
        line = (
            f"towers are idle for {idle:.0%} of the time, because they get no "
            "batch: end the dataset with .prefetch(tf.data.AUTOTUNE), use "
            "larger batches, or do less in callbacks after a batch."
        )
        found.append((steps * idle, line))
    for part, least in _OF_EPOCHS.items():
        share = measured.share_of_epochs(part)
        if share >= least and measured.epochs[part] >= _LONG_S:
            line = _EPOCHS[part].format(
                share=f"{share:.0%} of the time of epochs",
                seconds=f"{measured.seconds[part]:.2f}",
            )
            found.append((share, line))
    lines = [line for _, line in sorted(found, key=lambda f: -f[0])]
    return [*lines, *_others(measured)]


def _said(measured: Measured, phase: str) -> str:
    """Say how much of a step a phase takes."""
    seconds, share = measured.phases[phase], measured.share(phase)
    said = f"{share:.0%} of a step ({1e3 * seconds:.2f} ms"
    if measured.is_rare(phase):
        median = 1e3 * measured.medians[phase]
        said += f" on average, every so often: {median:.2f} ms at the median"
    return f"{said})"


def _input(measured: Measured, said: str) -> str:
    at_once = "" if measured.steps_per_execution > 1 else _AT_ONCE
    rare = measured.is_rare("input")
    if measured.phases["input"] <= _START_S and not rare:
        return at_once and f"starting a step takes {said}: {at_once}."
    # Of arrays only the first step of an epoch is slow every so often.
    sooner = _SOONER.get(measured.source, "" if rare else at_once)
    return sooner and f"a step waits for its input for {said}: {sooner}."


def _callbacks(measured: Measured, said: str) -> str:
    return (
        f"callbacks take {said}: do their work at the end of an epoch, show "
        "progress with verbose=2, or run them less often by compile(..., "
        "steps_per_execution=16)."
    )


def _wait(measured: Measured, said: str) -> str:
    compute = measured.compute
    if len(compute) < 2:
        return ""
    said = f"towers wait for one another for {said}"
    slow = int(np.argmax(compute))
    others = max(float(np.median(np.delete(compute, slow))), _TICK_S)
    times = compute[slow] / others
    if times >= _SLOW:
        return (
            f"{said}: {measured.names[slow]} computes {times:.1f} times as "
            "long as the others. Leave it out, if its device is slower or has "
            "other work; with AsyncTowerStrategy no tower waits."
        )
    if measured.shares_cores:
        return ""
    return (
        f"{said}, now for one, now for another: parts of one batch take "
        "different times. Put examples of equal length into a batch, or use "
        "AsyncTowerStrategy, where no tower waits."
    )


def _reduction(measured: Measured, said: str) -> str:
    more = ""
    if measured.ranks > 1 and "compression" in measured.options:
        more = f'; {measured.strategy}(compression="bf16") exchanges half'
    elif measured.towers > 1 and "packer" in measured.options:
        more = f"; {measured.strategy}(packer=True) sums fewer, larger buffers"
    return (
        f"the reduction of gradients takes {said}: a larger batch_size "
        f"computes longer for each of them{more}."
    )


def _update(measured: Measured, said: str) -> str:
    more = ""
    if "updates" in measured.options and measured.towers > 1:
        # On CPUs its cores are those of all towers.
        other = "sharded" if measured.cores is None else "once"
        if measured.updates != other:
            more = f'; try {measured.strategy}(updates="{other}")'
    return (
        f"the optimizer's update takes {said}: a larger batch_size updates "
        "less often, and keras.optimizers.SGD passes over the weights once, "
        f"others several times{more}."
    )


_PHASES = {
    "input": _input,
    "callbacks": _callbacks,
    "wait": _wait,
    "reduction": _reduction,
    "update": _update,
}


def _others(measured: Measured) -> Iterator[str]:
    """Yield advice that concerns no phase."""
    if measured.shares_cores:
        cores = measured.cores
        yield (
            f"{measured.towers} towers share {cores} "
            f"core{'s' * (cores != 1)}, so they compute in turn: more towers "
            "than cores only add work."
        )
    count, seconds = measured.traces
    if count > _TRACES:
        yield (
            f"{count} calls traced the step and took {seconds:.1f} s: each new "
            "shape of a batch is a trace. Give batches few shapes: "
            "batch(..., drop_remainder=True), padding to a few lengths."
        )
    if "step" in measured.phases and measured.towers * measured.ranks <= 1:
        yield (
            "the steps are not divided into phases, because they do not run "
            "on several towers: TowerStrategy takes all visible devices, and "
            "keras_towers.virtual_towers(n) makes n of a CPU."
        )
