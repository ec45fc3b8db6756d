"""The arithmetic of the benchmark: medians, ratios, overheads and ranges.

A result is the JSON entry of one row, for one model and number of replicas.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_towers.bench.plan import ADOPTION
from keras_towers.bench.rows import RAW, Suite
from keras_towers.bench.runner import Sample

# A measurement of one row, by repeat.
Repeats = Mapping[int, float]


@dataclass(frozen=True)
class Spread:
    """The median of several repeats, and their minimum and maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Summarize one value per repeat; None if there are no values."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.median(known), min(known), max(known))


def summarize(suite: Suite, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Combine all repeats into one result per row, in the order of samples.

    Its columns are those of the suite: each is a ``Spread``, or None if not
    available. Rows are compared with each other within each repeat.
    """
    # Only rows on the same model and number of replicas are compared.
    groups: dict[tuple[str, int], dict[str, list[Sample]]] = {}
    for sample in samples:
        cell = sample.cell
        if cell.kind == suite.kind:
            group = groups.setdefault((cell.model, cell.replicas), {})
            group.setdefault(cell.row, []).append(sample)
    return [
        {"model": model, suite.replicas: replicas, **result}
        for (model, replicas), group in groups.items()
        for result in _summarize_group(suite, group)
    ]


def _summarize_group(
    suite: Suite, group: dict[str, list[Sample]]
) -> list[dict[str, Any]]:
    steps = {name: _step_ms(samples) for name, samples in group.items()}
    costs = {
        name: _cost_ms(mine, steps.get(suite.rows[name].alone or "", {}))
        for name, mine in steps.items()
    }
    # If noise hides the overhead, it cannot be a divisor.
    raw = {r: ms for r, ms in costs.get(RAW, {}).items() if ms > 0}
    best = best_stock(suite, steps)
    results = []
    for name, mine in steps.items():
        measured = [s.result for s in group[name] if not s.error]
        columns = {
            "step_ms": Spread.of(mine.values()),
            "to_plain": ratio(mine, steps.get("plain", {})),
            "to_stock_default": ratio(mine, steps.get("stock-default", {})),
            "to_best_stock": ratio(mine, steps.get(best or "", {})),
            "best_stock": best,
            "cost_ms": Spread.of(costs[name].values()),
            "to_raw": ratio(costs[name], raw),
            "epoch_cost_s": Spread.of(r["epoch_cost_s"] for r in measured),
            **_start(suite, group, name, "first_step_s"),
            **_start(suite, group, name, "memory_mb"),
        }
        choice = measured[0].get(suite.choice_key) if measured else None
        results.append(
            {
                suite.row_key: name,
                **{column: columns[column] for column in suite.columns},
                suite.choice_key: choice,
                "failed": len(measured) < len(group[name]),
            }
        )
    return results


def _start(
    suite: Suite, group: Mapping[str, Sequence[Sample]], name: str, what: str
) -> dict[str, Spread | None]:
    """Summarize what a row needs until it trains, beside plain and stock.

    The best stock row is that which needs least of it.
    """
    values = {row: _values(samples, what) for row, samples in group.items()}
    mine, best = values[name], best_stock(suite, values)
    return {
        what: Spread.of(mine.values()),
        f"{what}_to_plain": ratio(mine, values.get("plain", {})),
        f"{what}_to_best_stock": ratio(mine, values.get(best or "", {})),
    }


def _values(samples: Sequence[Sample], what: str) -> Repeats:
    """Return one measurement of each repeat in which it was made."""
    return {
        sample.cell.repeat: sample.result[what]
        for sample in samples
        if sample.result.get(what)
    }


def _step_ms(samples: Sequence[Sample]) -> Repeats:
    """Return the median step of each repeat that did not fail."""
    return {
        sample.cell.repeat: statistics.median(sample.result["step_ms"])
        for sample in samples
        if not sample.error
    }


def _cost_ms(mine: Repeats, alone: Repeats) -> Repeats:
    """Return the time above that of the row that exchanges nothing."""
    return {r: mine[r] - alone[r] for r in mine if r in alone}


def ratio(mine: Repeats, other: Repeats) -> Spread | None:
    """Divide two rows repeat by repeat, where both were measured."""
    return Spread.of(mine[r] / other[r] for r in mine if r in other)


def best_stock(suite: Suite, steps: Mapping[str, Repeats]) -> str | None:
    """Name the stock row with the smallest median over its repeats."""
    medians = {
        name: statistics.median(repeats.values())
        for name, repeats in steps.items()
        if repeats and suite.rows[name].stock
    }
    return min(medians, key=medians.__getitem__, default=None)


def summarize_adoption(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Create one result per adoption sample.

    The first adoption in a process is reported separately, because it includes
    one-time initialization by TensorFlow.
    """
    return [_adoption(s) for s in samples if s.cell.kind == ADOPTION]


def _adoption(sample: Sample) -> dict[str, Any]:
    megabytes = copy_s = first_s = adopt_s = release_s = None
    if not sample.error:
        first_s, *later = sample.result["adopt_s"]
        megabytes = sample.result["bytes"] / 1e6
        copy_s = statistics.median(sample.result["copy_s"])
        adopt_s = statistics.median(later)
        release_s = statistics.median(sample.result["release_s"])
    return {
        "towers": sample.cell.replicas,
        "strategy": sample.cell.row,
        "megabytes": megabytes,
        "copy_s": copy_s,
        "first_adopt_s": first_s,
        "adopt_s": adopt_s,
        "release_s": release_s,
        "failed": bool(sample.error),
    }
