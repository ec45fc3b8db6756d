"""What there is to say of a ``fit`` that was measured."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_towers import devices as devices_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.system import usable_cores
from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline.host import Host
from keras_towers.timeline.measured import Measured
from keras_towers.timeline.phases import Calls, Took
from keras_towers.timeline.ranks import OfRank, rows_of
from keras_towers.timeline.source import source_of


class Summary(NamedTuple):
    """What there is to say of a ``fit``.

    Attributes:
        measured: what advice is derived from.
        towers: mean seconds of each tower, by the name of the phase.
        steps: how many steps the phases are of.
        total: how many there were.
        missing: what is not measured, and why; empty: nothing.
    """

    measured: Measured
    towers: dict[str, np.ndarray]
    steps: int
    total: int
    missing: str


def summarise(
    ranks: Sequence[OfRank],
    host: Host,
    model: keras.Model,
    config: TowerConfig | None,
    x: Any,
) -> Summary:
    """Say where the time went.

    Args:
        ranks: with the same steps, on one clock; rank 0 is the first.
        host: the times of rank 0 in Python.
        model: the model that was trained.
        config: the towers of this rank; None: none.
        x: the data, as ``fit`` got them.
    """
    first, calls = ranks[0], Calls(*ranks[0].calls)
    stamps = phases_lib.joined([of.stamps for of in ranks])
    spans = np.concatenate([of.spans for of in ranks])
    names = [name for (_, row), name in sorted(rows_of(ranks).items()) if row]
    phases: dict[str, Took]
    phases, towers, missing, busy = {}, {}, "", None
    if len(stamps):
        every = phases_lib.of_towers(stamps)
        # Its own towers waited for those of other ranks, too.
        own = {n: b[:, : len(first.devices)] for n, b in every.items()}
        phases = phases_lib.of_steps(own, calls, first.traced)
        steps = phases_lib.in_calls(own, calls)
        count = phases_lib.settled(steps, calls, first.traced)
        if phases:
            towers = phases_lib.per_tower(
                {name: bounds[count] for name, bounds in every.items()}
            )
    elif len(spans):
        phases, towers, busy = phases_lib.of_spans(spans, len(names))
    else:
        phases = phases_lib.of_one_device(calls, first.traced)
        missing = _why(model, config, len(calls.begins))
    kind = None if config is None else type(config.strategy)
    measured = Measured(
        {name: took.mean for name, took in phases.items()},
        towers.get("compute", towers.get("step", np.empty(0))),
        names,
        medians={name: took.median for name, took in phases.items()},
        seconds=host.seconds,
        whole=host.whole,
        first_validation=host.first_validation,
        source=source_of(x),
        strategy="" if kind is None else kind.__name__,
        options=() if kind is None else _parameters(kind),
        updates=getattr(config and config.strategy, "updates", ""),
        steps_per_execution=model.steps_per_execution,
        cores=_cores(config),
        towers=len(first.devices),
        ranks=len(ranks),
        traces=(host.traces, host.seconds["tracing"]),
        busy=busy,
    )
    number = len(stamps) or len(spans) or len(calls.begins)
    total = first.first_step + len(stamps) or first.first_call + number
    return Summary(measured, towers, number, total, missing)


def _why(model: keras.Model, config: TowerConfig | None, calls: int) -> str:
    """Why no phases were measured; empty if that is no wonder."""
    if config is None or not calls:
        return ""
    why = f"{config.name} runs them in a way that it does not know"
    if model.run_eagerly:
        why = "they run eagerly: compile the model without run_eagerly=True"
    return (
        f"Timeline has not measured the steps of model {model.name!r}, because "
        f"{why}. The trace has only the calls of Keras's loop."
    )


def _parameters(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _cores(config: TowerConfig | None) -> int | None:
    if config is None or not devices_lib.all_on_host(config.devices):
        return None
    return usable_cores()
