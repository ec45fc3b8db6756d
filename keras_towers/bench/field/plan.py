"""What to measure in the field."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keras_towers.bench.field.rows import ROWS, FieldRow, Runs, with_divisors


@dataclass(frozen=True)
class FieldCell:
    """One measurement, in fresh processes.

    Attributes:
        model: a key of ``models.MODELS``, or the user's ``module:function``.
        row: the name of a row.
        replicas: devices of one process, or processes.
        repeat: the number of the repeat, from 0.
    """

    model: str
    row: str
    replicas: int
    repeat: int

    @property
    def field_row(self) -> FieldRow:
        """The row itself."""
        return ROWS[self.row]

    @property
    def processes(self) -> int:
        """The number of processes that train."""
        return self.replicas if self.field_row.runs is Runs.RANKS else 1

    @property
    def title(self) -> str:
        """The title of the cell, the same for all repeats."""
        noun = "device" if self.replicas == 1 else self.field_row.runs.value
        return f"{self.model}, {self.replicas} {noun}, {self.row}"

    def as_json(self) -> dict[str, Any]:
        """Return it with the kind that other cells have."""
        return {"kind": "field", **asdict(self)}


def plan_field(
    models: Sequence[str],
    rows: Collection[str],
    counts: Sequence[int],
    repeats: int,
) -> list[FieldCell]:
    """List the cells in the order to run them.

    The reference comes first, and with one device each backend is measured once
    a repeat, close in time to what is compared with it.
    """
    chosen = with_divisors(rows)
    return [
        FieldCell(model, row.name, count, repeat)
        for repeat in range(repeats)
        for model in models
        for count in (1, *counts)
        for row in chosen
        if (row.runs is Runs.ONE) == (count == 1)
    ]
