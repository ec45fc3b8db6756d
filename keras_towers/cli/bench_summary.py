"""The arithmetic of the benchmark: medians, ratios and their ranges."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from keras_towers.cli.bench_runner import Sample
from keras_towers.cli.bench_strategies import STOCK


@dataclass(frozen=True)
class Spread:
    """The median of several repeats, and the smallest and largest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize one value per repeat."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class TrainingRow:
    """What was measured of one strategy, on one model and number of towers.

    A ratio divides this row's milliseconds by the other row's of the same
    repeat: below 1 this row is faster. It is ``None`` where the other row was
    not measured.
    """

    model: str
    towers: int
    strategy: str
    step_ms: Spread | None
    epoch_cost_s: Spread | None
    to_plain: Spread | None
    to_stock_default: Spread | None
    to_best_stock: Spread | None
    best_stock: str | None
    mode: str | None
    failed: bool


@dataclass(frozen=True)
class AdoptionRow:
    """What taking over a model costs, and giving it back.

    The first adoption in a process is told apart, because it also pays for
    what TensorFlow starts only once.
    """

    towers: int
    strategy: str
    megabytes: float | None = None
    copy_s: float | None = None
    first_adopt_s: float | None = None
    adopt_s: float | None = None
    release_s: float | None = None
    failed: bool = False


def grouped(
    samples: Sequence[Sample], kind: str
) -> dict[tuple[str, int], dict[str, list[Sample]]]:
    """Put the samples of a kind together that are compared with each other.

    Returns:
        By model and number of towers or processes: the samples of each row.
    """
    groups: dict[tuple[str, int], dict[str, list[Sample]]] = {}
    for sample in samples:
        if sample.job.kind == kind:
            group = groups.setdefault((sample.job.model, sample.job.towers), {})
            group.setdefault(sample.job.strategy, []).append(sample)
    return groups


def summarize_training(samples: Sequence[Sample]) -> list[TrainingRow]:
    """Make one row of every strategy, in the order of the samples."""
    return [
        row
        for (model, towers), group in grouped(samples, "training").items()
        for row in _summarize_group(model, towers, group)
    ]


def _summarize_group(
    model: str, towers: int, group: dict[str, list[Sample]]
) -> list[TrainingRow]:
    step_ms = {name: step_ms_of(samples) for name, samples in group.items()}
    best = best_stock(step_ms)
    rows = []
    for name, samples in group.items():
        epoch_s = [s.result["epoch_cost_s"] for s in samples if not s.error]
        mine = step_ms[name]
        rows.append(
            TrainingRow(
                model,
                towers,
                name,
                step_ms=spread_of(list(mine.values())),
                epoch_cost_s=spread_of(epoch_s),
                to_plain=ratio(mine, step_ms.get("plain", {})),
                to_stock_default=ratio(mine, step_ms.get("stock-default", {})),
                to_best_stock=ratio(mine, step_ms.get(best, {})),
                best_stock=best,
                mode=samples[0].result.get("mode"),
                failed=any(sample.error for sample in samples),
            )
        )
    return rows


def step_ms_of(samples: Sequence[Sample]) -> dict[int, float]:
    """Return the median step of each repeat that did not fail."""
    return {
        sample.job.repeat: statistics.median(sample.result["step_ms"])
        for sample in samples
        if not sample.error
    }


def spread_of(values: Sequence[float]) -> Spread | None:
    """Summarize one value per repeat, or nothing."""
    return Spread.of(values) if values else None


def ratio(mine: dict[int, float], other: dict[int, float]) -> Spread | None:
    """Divide two rows repeat by repeat.

    Args:
        mine: milliseconds by repeat.
        other: the same of the row to compare with.

    Returns:
        The ratios' spread over the repeats that both have, or ``None`` where
        there are none.
    """
    return spread_of([mine[r] / other[r] for r in mine if r in other])


def best_stock(step_ms: dict[str, dict[int, float]]) -> str | None:
    """Name the stock strategy with the smallest median over its repeats."""
    medians = {
        name: statistics.median(step_ms[name].values())
        for name in STOCK
        if step_ms.get(name)
    }
    return min(medians, key=medians.__getitem__, default=None)


def summarize_adoption(samples: Sequence[Sample]) -> list[AdoptionRow]:
    """Make one row of every adoption sample."""
    rows = []
    for sample in samples:
        if sample.job.kind != "adoption":
            continue
        job, result = sample.job, sample.result
        if sample.error:
            rows.append(AdoptionRow(job.towers, job.strategy, failed=True))
            continue
        first, *later = result["adopt_s"]
        rows.append(
            AdoptionRow(
                job.towers,
                job.strategy,
                megabytes=result["bytes"] / 1e6,
                copy_s=statistics.median(result["copy_s"]),
                first_adopt_s=first,
                adopt_s=statistics.median(later),
                release_s=statistics.median(result["release_s"]),
            )
        )
    return rows
