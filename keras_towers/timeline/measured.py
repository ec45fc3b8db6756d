"""Measurements of a ``fit``, summarised."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.system import usable_cores
from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline.phases import Calls, Took
from keras_towers.timeline.recorded import Host, OfRank, joined, rows_of

Source = Literal["dataset", "PyDataset", "DataLoader", "generator", "arrays"]
# How many times a phase's median its mean is where few steps take most of it.
_RARE = 3.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a ``fit``, and its conditions; times are in seconds."""

    # Means of a step in each phase.
    phases: dict[str, float]
    names: Sequence[str] = ()
    # As ``phases``, but medians; empty: the same.
    medians: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Of the parts of ``fit``, as ``host.PARTS``.
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    whole: float = 0.0
    # Of the first validation, which is traced.
    first_validation: float = 0.0
    source: Source = "dataset"
    strategy: str = "TowerStrategy"
    options: Sequence[str] = ()
    updates: str = "once"
    steps_per_execution: int = 1
    # Of the towers of a process; None: these are on accelerators.
    cores: int | None = None
    towers: int = 1
    ranks: int = 1
    # Number of calls that traced the step, and their seconds.
    traces: tuple[int, float] = (0, 0.0)
    # The fraction of the time that towers without a common step were in one;
    # None: they have a common step.
    busy: float | None = None
    # Means of each tower, by phase.
    of_towers: Mapping[str, np.ndarray] = dataclasses.field(
        default_factory=dict
    )
    # The number of steps in the phases, and of all.
    steps: tuple[int, int] = (0, 0)
    # Measurements that are missing, and why; empty: none.
    missing: str = ""

    @property
    def compute(self) -> np.ndarray:
        """Seconds of each tower in a step, or in its own; maybe none."""
        own = self.of_towers.get("step", np.empty(0))
        return self.of_towers.get("compute", own)

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.phases.values())

    @property
    def shares_cores(self) -> bool:
        """Whether there are more towers than cores."""
        return self.cores is not None and self.towers > self.cores

    def share(self, phase: str) -> float:
        """The fraction of a step that a phase takes."""
        return self.phases.get(phase, 0.0) / self.total if self.total else 0.0

    def is_rare(self, phase: str) -> bool:
        """Whether few steps take most of the time of a phase."""
        mean = self.phases[phase]
        return mean > _RARE * self.medians.get(phase, mean)

    @property
    def epochs(self) -> dict[str, float]:
        """Seconds of each part of ``fit``'s epochs, without any tracing."""
        names = ("steps", "validation", "ends of epochs")
        of = {name: self.seconds.get(name, 0.0) for name in names}
        of["validation"] -= self.first_validation
        return of

    def share_of_epochs(self, part: str) -> float:
        """The fraction of the time of epochs that a part of ``fit`` takes."""
        total = sum(self.epochs.values())
        return self.epochs[part] / total if total else 0.0


def summarise(
    ranks: Sequence[OfRank],
    host: Host,
    model: keras.Model,
    config: TowerConfig | None,
    x: Any,
) -> Measured:
    """Summarise the measurements of ranks with the same steps, on one clock."""
    first, calls = ranks[0], Calls(*ranks[0].calls)
    stamps = joined(ranks)
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
    number = len(stamps) or len(spans) or len(calls.begins)
    total = first.first_step + len(stamps) or first.first_call + number
    return Measured(
        {name: took.mean for name, took in phases.items()},
        names,
        medians={name: took.median for name, took in phases.items()},
        seconds=host.seconds,
        whole=host.whole,
        first_validation=host.first_validation,
        source=source_of(x),
        strategy="" if kind is None else kind.__name__,
        options=()
        if kind is None
        else tuple(inspect.signature(kind).parameters),
        updates=getattr(config and config.strategy, "updates", ""),
        steps_per_execution=model.steps_per_execution,
        cores=_cores(config),
        towers=len(first.devices),
        ranks=len(ranks),
        traces=(host.traces, host.seconds["tracing"]),
        busy=busy,
        of_towers=towers,
        steps=(number, total),
        missing=missing,
    )


def _why(model: keras.Model, config: TowerConfig | None, calls: int) -> str:
    """Say why no phases were measured; empty if none are expected."""
    if config is None or not calls:
        return ""
    why = f"{config.name} runs them in a way that it does not know"
    if model.run_eagerly:
        why = "they run eagerly: compile the model without run_eagerly=True"
    return (
        f"Timeline has not measured the steps of model {model.name!r}, because "
        f"{why}. The trace has only the calls of Keras's loop."
    )


def _cores(config: TowerConfig | None) -> int | None:
    if config is None or not devices_lib.all_on_host(config.devices):
        return None
    return usable_cores()


def source_of(x: Any) -> Source:
    """Return the kind of data that ``fit`` got as ``x``."""
    if isinstance(x, tf.data.Dataset | tf.distribute.DistributedDataset):
        return "dataset"
    if isinstance(x, keras.utils.PyDataset):
        return "PyDataset"
    if isinstance(x, types.GeneratorType):
        return "generator"
    # PyTorch's, of which Keras takes it, need not be installed.
    if any(cls.__name__ == "DataLoader" for cls in type(x).__mro__):
        return "DataLoader"
    return "arrays"
