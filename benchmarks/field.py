"""Which rows of the field count: those whose losses are the reference's.

After MLPerf's rule that figures of speed are compared only between trainings
that reach the same result. Here the whole beginning of the curve has to agree,
because a wrong mean over replicas shows in the second step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from keras_towers.bench import report
from keras_towers.bench.compare import Comparison
from keras_towers.bench.report import COLUMNS, Column, Spread
from keras_towers.bench.runner import Sample

REFERENCE, FROZEN = "plain", "plain-frozen"
# Of two losses, relative to the reference's. Other orders of summation stay far
# below it; a mean over other examples, or another optimizer, far above.
TOLERANCE = 1e-3
# How many times that training has to change the losses, so that half of its
# effect does not pass for all of it.
_TELLING = 2
FIELD_COLUMNS = {
    "examples_per_s": Column(
        "examples\n/s", "of the global batch, by the median step.", "{:.0f}"
    ),
    "efficiency": Column(
        "effi-\nciency",
        "throughput relative to n times one device of the same backend; none "
        "where devices share cores.",
        "{:.0f} %",
        100,
    ),
    **{
        name: COLUMNS[name]
        for name in ("step_ms", "cost_ms", "first_step_s", "memory_mb")
    },
}


class Field(Comparison):
    """A comparison in which only rows with the reference's losses count."""

    columns = FIELD_COLUMNS

    def results(self) -> list[dict[str, Any]]:
        """Return one result per row, model and number of devices."""
        refused = self._refused()
        results = report.summarize(self.rows, self.samples, refused)
        devices = len(self.facts["gpus"])
        if self.setting.device == "cpu":
            devices = self.facts["cores"]
        for result in results:
            throughput = inverse(result["step_ms"], 1e3 * self.setting.batch)
            count, plain = result["replicas"], result["to_plain"]
            divides = 1 < count <= devices
            result["examples_per_s"] = throughput
            efficiency = inverse(plain, 1 / count) if divides else None
            result["efficiency"] = efficiency
        return [r for r in results if r["row"] != FROZEN]

    def _refused(self) -> dict[tuple[str, int, str], str]:
        """Say why rows do not count, by model, number of devices and name."""
        ran = {
            (s.cell.model, s.cell.row, s.cell.repeat): s.result
            for s in self.samples
            if s.cell.replicas == 1
        }
        refused = {}
        for sample in self.samples:
            cell = sample.cell
            if self.rows[cell.row].alone or cell.row == FROZEN:
                continue
            reference, still = (
                ran.get((cell.model, name, cell.repeat), {})
                for name in (REFERENCE, FROZEN)
            )
            if why := why_not(sample, reference, still):
                refused[cell.key] = why
        return refused


def inverse(spread: Spread | None, factor: float) -> Spread | None:
    """Divide a factor by what was measured."""
    if spread is None:
        return None
    return Spread(
        *(factor / of for of in (spread.median, spread.high, spread.low))
    )


def why_not(
    sample: Sample, reference: Mapping[str, Any], frozen: Mapping[str, Any]
) -> str:
    """Say why a sample does not count, or nothing.

    Args:
        sample: the sample.
        reference: the reference's result; empty: it failed.
        frozen: its result where weights stay as they are.
    """
    if sample.error:
        return "failed"
    if not reference or not frozen:
        return "the reference failed"
    why = difference(sample.result["losses"], reference["losses"])
    if why or sample.cell.row == REFERENCE:
        return why
    return undecided(reference["losses"], frozen["losses"])


def difference(losses: Sequence[float], reference: Sequence[float]) -> str:
    """Say where two curves differ first, or nothing if they agree.

    Args:
        losses: the loss of each step, as a mean over the global batch.
        reference: the losses to agree with.

    Example:
        >>> difference([2.3, 1.0], [2.3, 2.1])
        'loss differs from step 2 on (1.000 against 2.100)'
    """
    if not reference:
        return "the reference has no losses"
    if len(losses) != len(reference):
        return f"{len(losses)} losses, against {len(reference)}"
    for step, (mine, other) in enumerate(
        zip(losses, reference, strict=True), 1
    ):
        # Infinity is no loss to agree on, and NaN agrees with nothing.
        if not (math.isfinite(other) and _close(mine, other)):
            shown = f"{mine:.3f} against {other:.3f}"
            if f"{mine:.3f}" == f"{other:.3f}":
                shown = f"{mine:.7g} against {other:.7g}"
            return f"loss differs from step {step} on ({shown})"
    return ""


def undecided(reference: Sequence[float], frozen: Sequence[float]) -> str:
    """Say why equal curves would not show that a row trains, or nothing.

    Args:
        reference: the loss of each step.
        frozen: the same, where weights stay as they are.

    Example:
        >>> undecided([2.3, 2.2999, 2.2998], [2.3, 2.3, 2.3])
        'training changes the loss by at most 0.0087% in 3 steps, ...'
    """
    moved = max(
        (
            abs(mine - other) / abs(other) if other else math.inf
            for mine, other in zip(frozen, reference, strict=True)
            if mine != other
        ),
        default=0.0,
    )
    if not moved < _TELLING * TOLERANCE:
        return ""
    return (
        f"training changes the loss by at most {100 * moved:.2g}% in "
        f"{len(reference)} steps, which would not show a row that does not "
        "train: use a larger learning rate, which takes no longer"
    )


def _close(mine: float, other: float) -> bool:
    return abs(mine - other) <= TOLERANCE * abs(other)
