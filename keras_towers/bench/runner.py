"""Runs cells, each in fresh processes with a time limit."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from keras_towers import subprocesses
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.plan import ADOPTION, Cell, Setting
from keras_towers.bench.worker import RESULT

_STDERR_LINES = 12
# The launcher needs time to end its ranks.
_GRACE_S = 15
# One core per rank: with more threads a single rank would use all cores.
ONE_CORE = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# Ranks that exchange gradients end with equal weights, bit-identical with most
# engines. Without an exchange they differ far more than this.
_SAME_WEIGHTS = 1e-5


class WorkerFailed(Exception):
    """A process failed; the text is the end of its output."""


class Measurable(Protocol):
    """A cell of this benchmark or of the field."""

    @property
    def title(self) -> str:
        """The same for all repeats."""
        ...

    def as_json(self) -> dict[str, Any]:
        """What was measured, with the same keys for all kinds of cells."""
        ...


CellT = TypeVar("CellT", bound=Measurable)


@dataclass
class Sample(Generic[CellT]):
    """The outcome of one cell: its measurements, or an error."""

    cell: CellT
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it with the same keys for all kinds of cells."""
        job = self.cell.as_json()
        return {"job": job, "result": self.result, "error": self.error}


def sampled(
    cell: CellT, measure: Callable[[], dict[str, Any]]
) -> Sample[CellT]:
    """Measure a cell; if that fails, the others are not lost with it."""
    try:
        return Sample(cell, measure())
    except WorkerFailed as error:
        return Sample(cell, error=str(error))
    except Exception as error:
        return Sample(cell, error=f"{type(error).__name__}: {error}")


def failed_before(cell: Measurable, samples: Sequence[Sample]) -> bool:
    """Whether an earlier repeat failed.

    So a strategy that hangs does not use up its time limit in every repeat.
    """
    return any(s.error and s.cell.title == cell.title for s in samples)


def run_cell(cell: Cell, setting: Setting) -> Sample:
    """Measure one cell in separate processes."""
    return sampled(cell, lambda: _run_cell(cell, setting))


def _run_cell(cell: Cell, setting: Setting) -> dict[str, Any]:
    launcher: list[str] = []
    environment = {}
    if cell.processes > 1:
        number = str(cell.processes)
        row = cell.suite.rows[cell.row]
        launcher = ["-np", number, *row.launcher]
        if row.servers:
            launcher = ["--ps", str(row.servers), "--workers", number]
        environment = ONE_CORE
    task = {"cell": asdict(cell), "setting": asdict(setting)}
    ranks = run_workers(
        "keras_towers.bench.worker",
        task,
        cell.processes,
        launcher,
        setting.timeout_s,
        environment,
    )
    return combine(cell, ranks)


def run_workers(
    module: str,
    task: dict[str, Any],
    processes: int,
    launcher: Sequence[str],
    timeout_s: float,
    environment: dict[str, str],
) -> list[dict[str, Any]]:
    """Run a worker in each of some processes.

    Args:
        module: the worker's, which leaves its result in a ``Meeting``.
        task: what the worker is told, beside the folder of that meeting.
        processes: how many leave a result.
        launcher: options of ``keras-towers run`` with several processes; a
            single one is not launched.
        timeout_s: the time limit of all of it in seconds.
        environment: variables for the processes.

    Returns:
        The results, by rank.

    Raises:
        WorkerFailed: a process failed, wrote no result, or exceeded the limit.
    """
    with tempfile.TemporaryDirectory(prefix="keras-towers-bench-") as folder:
        command = ["-m", module, json.dumps({**task, "folder": folder})]
        if processes > 1:
            run = ["-m", "keras_towers.cli.main", "run"]
            command = [*run, *launcher, *command]
        run_python(command, timeout_s, environment)
        try:
            texts = Meeting(Path(folder), 0, processes).read(RESULT)
        except FileNotFoundError:
            raise WorkerFailed("a process wrote no result") from None
    return [json.loads(text) for text in texts]


def combine(cell: Cell, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the measurements of the processes of a cell.

    Raises:
        WorkerFailed: the processes trained different models.
    """
    first = ranks[0]
    if cell.kind == ADOPTION:
        return first
    if cell.suite.rows[cell.row].alone:
        same_weights(ranks)
    means = ("first_step_s", "epoch_cost_s", "memory_mb", "loss")
    return {
        "step_ms": [ms for rank in ranks for ms in rank["step_ms"]],
        **{name: mean([rank[name] for rank in ranks]) for name in means},
        cell.suite.choice_key: first["choice"],
        "jit_compile": first["jit_compile"],
    }


def same_weights(ranks: Sequence[dict[str, Any]]) -> None:
    """Check that all ranks ended with the same weights.

    Raises:
        WorkerFailed: they trained different models.
    """
    differences = [
        abs(mine - other)
        for rank in ranks
        for mine, other in zip(
            rank["witness"], ranks[0]["witness"], strict=True
        )
    ]
    # Written so that NaN fails.
    if not all(value <= _SAME_WEIGHTS for value in differences):
        raise WorkerFailed(
            "after training, the weights of the ranks differ by "
            f"{max(differences):.1e}: gradients were not exchanged"
        )


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def run_python(
    arguments: Sequence[str], timeout_s: float, environment: dict[str, str]
) -> None:
    """Run a Python process.

    Raises:
        WorkerFailed: it failed or exceeded the time limit.
    """
    # So that workers find this package in any current directory.
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    ended = subprocesses.run(
        [sys.executable, *arguments],
        timeout_s,
        {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            **environment,
        },
        grace_s=_GRACE_S,
    )
    if ended.code is None:
        raise WorkerFailed(f"no result after {timeout_s:g} seconds")
    if ended.code != 0:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        code = f"exit code {ended.code}"
        raise WorkerFailed("\n".join([code, *lines[-_STDERR_LINES:]]))
