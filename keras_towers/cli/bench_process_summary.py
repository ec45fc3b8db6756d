"""The arithmetic of the benchmark of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_towers.cli.bench_rows import RAW, compute_row
from keras_towers.cli.bench_runner import Sample
from keras_towers.cli.bench_summary import (
    Spread,
    grouped,
    ratio,
    spread_of,
    step_ms_of,
)


@dataclass(frozen=True)
class ProcessRow:
    """What was measured of one row, on one model and number of processes.

    Attributes:
        model: the model.
        processes: how many processes trained it.
        row: one of ``bench_rows.ROWS``.
        step_ms: milliseconds a step.
        cost_ms: how many of them are above the step of the same repeat that
            exchanges nothing; None for that row itself.
        to_raw: the cost divided by raw Horovod's of the same repeat.
        epoch_cost_s: seconds that an epoch of ``fit`` costs beside its steps.
        how: what the row chose to do, if it had a choice.
        failed: whether a repeat failed.
    """

    model: str
    processes: int
    row: str
    step_ms: Spread | None
    cost_ms: Spread | None
    to_raw: Spread | None
    epoch_cost_s: Spread | None
    how: str | None
    failed: bool


def summarize_processes(samples: Sequence[Sample]) -> list[ProcessRow]:
    """Make one row of all repeats, in the order of the samples."""
    return [
        row
        for (model, processes), group in grouped(samples, "processes").items()
        for row in _summarize_group(model, processes, group)
    ]


def _summarize_group(
    model: str, processes: int, group: dict[str, list[Sample]]
) -> list[ProcessRow]:
    step_ms = {name: step_ms_of(samples) for name, samples in group.items()}
    costs = {name: _costs(name, step_ms) for name in group}
    # Where noise hides it, nothing can be divided by it.
    raw = {r: cost for r, cost in costs.get(RAW, {}).items() if cost > 0}
    rows = []
    for name, samples in group.items():
        results = [sample.result for sample in samples if not sample.error]
        epochs = [result.get("epoch_cost_s") for result in results]
        rows.append(
            ProcessRow(
                model,
                processes,
                name,
                step_ms=spread_of(list(step_ms[name].values())),
                cost_ms=spread_of(list(costs[name].values())),
                to_raw=ratio(costs[name], raw),
                epoch_cost_s=spread_of([s for s in epochs if s is not None]),
                how=results[0].get("how") if results else None,
                failed=any(sample.error for sample in samples),
            )
        )
    return rows


def _costs(name: str, step_ms: dict[str, dict[int, float]]) -> dict[int, float]:
    """Milliseconds above the row that exchanges nothing, by repeat."""
    base = compute_row(name)
    if name == base:
        return {}
    alone = step_ms.get(base, {})
    return {r: ms - alone[r] for r, ms in step_ms[name].items() if r in alone}
