"""Running the benchmark of several processes, one job after another."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_towers.cli.bench_meeting import Meeting
from keras_towers.cli.bench_rank import RESULT
from keras_towers.cli.bench_rows import COMPUTE_ROWS, ROWS, TORCH_ROWS
from keras_towers.cli.bench_runner import Job, WorkerFailed, run_python

# Weights of ranks that exchanged their gradients are equal, to the bit with
# most engines; of ranks that did not they differ in the second digit.
_SAME_WEIGHTS = 1e-5
# One core a rank: with more threads, one rank would already use all cores.
_ENVIRONMENT = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def default_rows() -> list[str]:
    """Name the rows that can be measured here."""
    torch = importlib.util.find_spec("torch") is not None
    return [row for row in ROWS if torch or row not in TORCH_ROWS]


def plan_processes(
    models: Sequence[str],
    rows: Sequence[str],
    processes: Sequence[int],
    repeats: int,
) -> list[Job]:
    """List the jobs, alternating rows inside every repeat.

    Args:
        models: the models to train.
        rows: some of ``bench_rows.ROWS``.
        processes: the numbers of processes.
        repeats: how often each is measured.

    Returns:
        The jobs in the order to run them.
    """
    return [
        Job("processes", model, row, count, repeat)
        for repeat in range(repeats)
        for model in models
        for count in processes
        for row in ROWS
        if row in rows
    ]


def run_processes(
    job: Job, batch_size: int, batches: int, timeout_s: float
) -> dict[str, Any]:
    """Measure one row in processes that ``keras-towers run`` starts.

    Args:
        job: what to measure.
        batch_size: examples of a step on each rank.
        batches: how many steps to time.
        timeout_s: how many seconds it may take.

    Returns:
        What the ranks measured.

    Raises:
        WorkerFailed: it did not work.
    """
    with tempfile.TemporaryDirectory(prefix="keras-towers-bench-") as folder:
        run_python(
            [
                *("-m", "keras_towers.cli.main", "run"),
                *("-np", str(job.towers), "-m", "keras_towers.cli.bench_rank"),
                *("--row", job.strategy, "--model", job.model),
                *("--batches", str(batches), "--batch-size", str(batch_size)),
                *("--folder", folder),
            ],
            timeout_s,
            {**_ENVIRONMENT, "PYTHONPATH": _path()},
        )
        try:
            texts = Meeting(Path(folder), 0, job.towers).read(RESULT)
        except FileNotFoundError:
            raise WorkerFailed("a rank left no result") from None
    return combine(job.strategy, [json.loads(text) for text in texts])


def _path() -> str:
    """Let the ranks find this package from wherever the command is run."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def combine(row: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put what the ranks of a job measured together.

    Args:
        row: one of ``bench_rows.ROWS``.
        ranks: the result of each.

    Raises:
        WorkerFailed: the ranks trained different models.
    """
    if row not in COMPUTE_ROWS:
        differences = [
            abs(mine - other)
            for rank in ranks
            for mine, other in zip(
                rank["witness"], ranks[0]["witness"], strict=True
            )
        ]
        # Asked this way round, weights that are no numbers do not agree.
        if not all(value <= _SAME_WEIGHTS for value in differences):
            raise WorkerFailed(
                "after training, the weights of the ranks differ by "
                f"{max(differences):.1e}: gradients were not exchanged"
            )
    return {
        "step_ms": [ms for rank in ranks for ms in rank["step_ms"]],
        "epoch_cost_s": _mean([rank["epoch_cost_s"] for rank in ranks]),
        "loss": _mean([rank["loss"] for rank in ranks]),
        "how": ranks[0]["how"],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
