"""What to measure: the cells that the options of the benchmark ask for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keras_towers.bench.rows import PROCESSES, TOWERS, Suite
from keras_towers.errors import TowerError

ADOPTION = "adoption"


@dataclass(frozen=True)
class Cell:
    """One measurement to make, by fresh processes.

    Attributes:
        kind: of a suite, or ``ADOPTION``.
        model: a key of ``models.MODELS``.
        row: the name of a row.
        replicas: towers of one process, or processes.
        repeat: how many such cells come before it.
    """

    kind: str
    model: str
    row: str
    replicas: int
    repeat: int

    @property
    def suite(self) -> Suite:
        """Where the row comes from."""
        return PROCESSES if self.kind == PROCESSES.kind else TOWERS

    @property
    def processes(self) -> int:
        """How many processes train."""
        return self.replicas if self.suite is PROCESSES else 1

    @property
    def title(self) -> str:
        """The cell in words, the same for all repeats."""
        suite = self.suite
        noun = suite.replica if self.replicas == 1 else suite.replicas
        return f"{self.model}, {self.replicas} {noun}, {self.row}"


@dataclass(frozen=True)
class Setting:
    """What all cells have in common.

    Attributes:
        device: ``"cpu"`` or ``"gpu"``.
        batch: examples of a step in each process.
        batches: how many steps to time.
        timeout_s: seconds that one cell may take.
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
    """List the cells in the order to run them, with adoption if wanted.

    Rows that are compared with each other run close together in time, so that
    a machine that slows down half-way slows all of them. For the same reason
    plain Keras is measured again beside every number of replicas.
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
    """Split names given by commas; None stands for the default.

    Raises:
        TowerError: a name is not allowed, or none is given where there is a
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
    """Read whole numbers given by commas, or raise ``TowerError``."""
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = [least - 1]
    if counts[0] < least:
        raise TowerError(
            f"{option} takes whole numbers from {least}, not '{text}'"
        )
    return counts
