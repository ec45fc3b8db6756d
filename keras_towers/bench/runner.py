"""Running one cell after another, each in fresh processes with a time limit."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keras_towers import subprocesses
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.plan import ADOPTION, Cell, Setting
from keras_towers.bench.worker import RESULT

_STDERR_LINES = 12
# A launcher needs some time to end its ranks.
_GRACE_S = 15
# One core a rank: with more threads, one rank would already use all cores.
_ONE_CORE = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# Weights of ranks that exchanged their gradients are equal, to the bit with
# most engines; of ranks that did not they differ in the second digit.
_SAME_WEIGHTS = 1e-5


@dataclass
class Sample:
    """The outcome of one cell: what was measured, or why nothing was."""

    cell: Cell
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it with one name for towers and processes, and their rows."""
        job = asdict(self.cell)
        job["strategy"], job["towers"] = job.pop("row"), job.pop("replicas")
        return {"job": job, "result": self.result, "error": self.error}


class WorkerFailed(Exception):
    """A process ended badly; the text is the end of what it said."""


def run_cell(cell: Cell, setting: Setting) -> Sample:
    """Measure one cell in processes of its own."""
    try:
        return Sample(cell, _run_cell(cell, setting))
    except WorkerFailed as error:
        return Sample(cell, error=str(error))


def failed_before(cell: Cell, samples: Sequence[Sample]) -> bool:
    """Whether an earlier repeat failed.

    One strategy that hangs need not take its time limit in every repeat.
    """
    return any(s.error and s.cell.title == cell.title for s in samples)


def _run_cell(cell: Cell, setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="keras-towers-bench-") as folder:
        task = {"cell": asdict(cell), "setting": asdict(setting)}
        task_json = json.dumps({**task, "folder": folder})
        command = ["-m", "keras_towers.bench.worker", task_json]
        environment = {}
        if cell.processes > 1:
            launcher = ["-m", "keras_towers.cli.main", "run"]
            command = [*launcher, "-np", str(cell.processes), *command]
            environment = _ONE_CORE
        _run_python(command, setting.timeout_s, environment)
        try:
            texts = Meeting(Path(folder), 0, cell.processes).read(RESULT)
        except FileNotFoundError:
            raise WorkerFailed("a process left no result") from None
    return combine(cell, [json.loads(text) for text in texts])


def combine(cell: Cell, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put what the processes of a cell measured together.

    Raises:
        WorkerFailed: the processes trained different models.
    """
    first = ranks[0]
    if cell.kind == ADOPTION:
        return first
    if cell.suite.rows[cell.row].alone:
        differences = [
            abs(mine - other)
            for rank in ranks
            for mine, other in zip(
                rank["witness"], first["witness"], strict=True
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
        cell.suite.choice_key: first["choice"],
        "jit_compile": first["jit_compile"],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _run_python(
    arguments: Sequence[str], timeout_s: float, environment: dict[str, str]
) -> None:
    """Run a Python process.

    Raises:
        WorkerFailed: it ended with an error or ran too long.
    """
    # Workers find this package from wherever the command is run.
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
