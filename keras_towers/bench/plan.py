"""What to measure: the cells selected by the options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keras_towers.bench.rows import PROCESSES, TOWERS, Suite
from keras_towers.errors import TowerError

ADOPTION = "adoption"


@dataclass(frozen=True)
class Cell:
    """One measurement, in fresh processes.

    Attributes:
        kind: the kind of a suite, or ``ADOPTION``.
        model: a key of ``models.MODELS``.
        row: the name of a row.
        replicas: towers of one process, or processes.
        repeat: the number of the repeat, from 0.
    """

    kind: str
    model: str
    row: str
    replicas: int
    repeat: int

    @property
    def suite(self) -> Suite:
        """The suite that the row belongs to."""
        return PROCESSES if self.kind == PROCESSES.kind else TOWERS

    @property
    def processes(self) -> int:
        """The number of processes that train."""
        return self.replicas if self.suite is PROCESSES else 1

    @property
    def title(self) -> str:
        """The title of the cell, the same for all repeats."""
        suite = self.suite
        noun = suite.replica if self.replicas == 1 else suite.replicas
        return f"{self.model}, {self.replicas} {noun}, {self.row}"

    def as_json(self) -> dict[str, Any]:
        """Return it with the same keys for towers and processes."""
        job = asdict(self)
        job["strategy"], job["towers"] = job.pop("row"), job.pop("replicas")
        return job


@dataclass(frozen=True)
class Setting:
    """What all cells have in common.

    Attributes:
        device: ``"cpu"`` or ``"gpu"``.
        batch: examples per step and process.
        batches: the number of steps to time.
        timeout_s: the time limit of one cell in seconds.
    """

    device: str
    batch: int
    batches: int
    timeout_s: float


def plan_cells(
    suite: Suite,
    models: Sequence[str],
    rows: Collection[str],
    counts: Sequence[int],
    repeats: int,
    adoption: bool,
) -> list[Cell]:
    """List the cells in the order to run them, including adoption if wanted.

    Rows that are compared with each other run close together in time, so that
    changes in the machine's speed affect all of them. For the same reason plain
    Keras is measured again for every number of replicas.
    """
    ordered = [row for row in suite.rows.values() if row.name in rows]
    cells = [
        Cell(suite.kind, model, row.name, count, repeat)
        for repeat in range(repeats)
        for model in models
        for count in counts
        for row in ordered
    ]
    if adoption:
        cells += [
            Cell(ADOPTION, ADOPTION, row.name, count, 0)
            for count in counts
            for row in ordered
            if row.strategy
        ]
    return cells


def choices(
    what: str, text: str | None, allowed: Collection[str], default: list[str]
) -> list[str]:
    """Split comma-separated names; None means the default.

    Raises:
        TowerError: a name is not allowed, or none is given although there is a
            default.
    """
    if text is None:
        return default
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = ", ".join(allowed)
    if default and not names:
        raise TowerError(f"no {what} given; choose {known}")
    for name in names:
        if name not in allowed:
            raise TowerError(f"unknown {what} '{name}'; choose {known}")
    return list(dict.fromkeys(names))


def numbers(option: str, text: str, least: int) -> list[int]:
    """Parse comma-separated whole numbers.

    Raises:
        TowerError: one is not a whole number, or less than ``least``.
    """
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = [least - 1]
    if counts[0] < least:
        raise TowerError(
            f"{option} takes whole numbers from {least}, not '{text}'"
        )
    return counts
