"""What to change, as measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from keras_towers.timeline.measured import Measured

# Fractions of a step from which on a phase stands out.
_INPUT = 0.2
_CALLBACKS = 0.1
_WAIT = 0.15
_REDUCTION = 0.3
_UPDATE = 0.3
# Fractions of the time of epochs.
_VALIDATION = 0.2
_ENDS = 0.1
# Seconds of them that are worth a line.
_LONG_S = 0.1
# How much longer than the others a slow tower computes.
_SLOW = 1.25
# Seconds that TensorFlow takes at most to start a step whose batch is there.
_START_S = 3e-3
# A model is traced for whole batches and, once more, for any other size.
_TRACES = 2
# The fraction of the time that a tower by itself is busy.
_BUSY = 0.8


def advise(measured: Measured) -> list[str]:
    """What to change, the most important first; empty: nothing stands out.

    Example:
        >>> phases = {"compute": 0.01, "callbacks": 0.03}
        >>> advise(Measured(phases, np.array([0.01, 0.01])))
        ['callbacks take 75% of a step (30.00 ms): ...']
    """
    found: list[tuple[float, str]] = []
    steps = measured.share_of_epochs("steps") if measured.seconds else 1.0
    for kind in (_input, _callbacks, _wait, _reduction, _update, _idle):
        found += [(steps * share, line) for share, line in kind(measured)]
    for kind in (_validation, _ends):
        found += kind(measured)
    lines = [line for _, line in sorted(found, key=lambda f: -f[0])]
    return [*lines, *_cores(measured), *_traces(measured), *_one(measured)]


Advice = Iterator[tuple[float, str]]


def _said(measured: Measured, phase: str) -> str:
    seconds, share = measured.phases[phase], measured.share(phase)
    said = f"{share:.0%} of a step ({1e3 * seconds:.2f} ms"
    if measured.is_rare(phase):
        median = 1e3 * measured.medians[phase]
        said += f" on average, every so often: {median:.2f} ms at the median"
    return f"{said})"


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


def _input(measured: Measured) -> Advice:
    if (share := measured.share("input")) < _INPUT:
        return
    said = _said(measured, "input")
    is_start = measured.phases["input"] <= _START_S
    is_rare, more = measured.is_rare("input"), measured.steps_per_execution > 1
    if is_start and not is_rare:
        if not more:
            yield share, f"starting a step takes {said}: {_AT_ONCE}."
    elif measured.source in _SOONER:
        sooner = _SOONER[measured.source]
        yield share, f"a step waits for its input for {said}: {sooner}."
    # Of arrays only the first step of an epoch is slow every so often.
    elif not (is_rare or more):
        yield share, f"a step waits for its input for {said}: {_AT_ONCE}."


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
    more = ""
    if "updates" in measured.options and (others := _updates(measured)):
        options = [f'{measured.strategy}(updates="{o}")' for o in others]
        more = f"; try {' or '.join(options)}"
    yield (
        share,
        f"the optimizer's update takes {_said(measured, 'update')}: a larger "
        "batch_size updates less often, and keras.optimizers.SGD passes over "
        f"the weights once, others several times{more}.",
    )


def _updates(measured: Measured) -> Sequence[str]:
    """Who else could update the weights, and be sooner ready."""
    if measured.cores is not None:
        # Its cores are those of all towers.
        return ["once"] if measured.updates in ("each", "sharded") else []
    if measured.towers == 1:
        return ["each"] if measured.updates == "once" else []
    others = {"once": ["sharded", "each"], "each": ["sharded"]}
    return others.get(measured.updates, [])


def _validation(measured: Measured) -> Advice:
    share = measured.share_of_epochs("validation")
    if share < _VALIDATION or measured.epochs["validation"] < _LONG_S:
        return
    seconds = measured.seconds["validation"]
    yield (
        share,
        f"validation takes {share:.0%} of the time of epochs ({seconds:.2f} "
        "s): fit(..., validation_freq=5) does it less often, and a larger "
        "validation_batch_size in fewer steps.",
    )


def _ends(measured: Measured) -> Advice:
    share, seconds = (
        measured.share_of_epochs("ends of epochs"),
        measured.epochs["ends of epochs"],
    )
    if share < _ENDS or seconds < _LONG_S:
        return
    yield (
        share,
        f"callbacks take {share:.0%} of the time of epochs at their ends "
        f"({seconds:.2f} s): save and evaluate after every few epochs only, or "
        "make epochs longer by fit(..., steps_per_epoch=...).",
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
    if "step" in measured.phases and measured.towers * measured.ranks <= 1:
        yield (
            "the steps are not divided into phases, because they do not run "
            "on several towers: TowerStrategy takes all visible devices, and "
            "keras_towers.virtual_towers(n) makes n of a CPU."
        )
