"""What was measured of a ``fit``, and of what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from keras_towers.timeline.source import Source

# How many times a phase's median its mean is where few steps take most of it.
_RARE = 3.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured, and of what.

    Attributes:
        phases: mean seconds that each phase takes of a step.
        compute: seconds that each tower computes in a step, or its own steps
            take; empty if not measured.
        names: what the towers are called.
        medians: as ``phases``, but medians; empty: the same.
        seconds: what the parts of ``fit`` took in all, as ``host.PARTS``.
        whole: seconds of ``fit``.
        first_validation: seconds of the first validation, which is traced.
        source: where the data come from.
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
    medians: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    whole: float = 0.0
    first_validation: float = 0.0
    source: Source = "dataset"
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

    def is_rare(self, phase: str) -> bool:
        """Whether few steps take most of the time of a phase."""
        mean = self.phases[phase]
        return mean > _RARE * self.medians.get(phase, mean)

    @property
    def epochs(self) -> dict[str, float]:
        """Seconds of what is repeated in ``fit``, without any tracing."""
        names = ("steps", "validation", "ends of epochs")
        of = {name: self.seconds.get(name, 0.0) for name in names}
        of["validation"] -= self.first_validation
        return of

    def share_of_epochs(self, part: str) -> float:
        """The fraction of the time of epochs that a part of ``fit`` takes."""
        total = sum(self.epochs.values())
        return self.epochs[part] / total if total else 0.0
