"""Cells, each measured in fresh processes with a time limit."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keras_towers import subprocesses
from keras_towers.bench.rows import Row, Runs
from keras_towers.errors import TowerError
from keras_towers.rendezvous.launchers import LAUNCHERS
from keras_towers.rendezvous.store import FileStore
from keras_towers.settings import SECRET, STORE

# The first steps, each of which waits for its loss.
FIRST_STEPS = 20
RESULT = "result"
"""With its rank behind it, the key under which a process leaves its result."""
_STDERR_LINES = 12
# The launcher needs time to end its ranks.
_GRACE_S = 15
# With more threads a single rank would use all cores.
_ONE_CORE = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
}
# Prefixes of variables of a job that this may run in; others of Horovod's are
# settings.
_OTHER_JOBS = (
    "DMLC_",
    "HOROVOD_CROSS_",
    "HOROVOD_ELASTIC",
    "HOROVOD_GLOO_RENDEZVOUS",
    "HOROVOD_HOSTNAME",
    "HOROVOD_LOCAL_",
    "HOROVOD_SIZE",
    "OMPI_",
    "PMI",
    "SLURM_",
    "TF_CONFIG",
    SECRET,
    STORE,
    *filter(None, (launcher.rank_in for launcher in LAUNCHERS)),
)


@dataclass(frozen=True)
class Cell:
    """One measurement, in fresh processes."""

    model: str
    row: str
    replicas: int
    repeat: int

    @property
    def key(self) -> tuple[str, int, str]:
        """The key that all repeats of the cell have in common."""
        return self.model, self.replicas, self.row

    @property
    def title(self) -> str:
        """The title of the cell, the same for all repeats."""
        noun = "replica" if self.replicas == 1 else "replicas"
        return f"{self.model}, {self.replicas} {noun}, {self.row}"


@dataclass(frozen=True)
class Setting:
    """The options of all cells.

    Attributes:
        device: "cpu" or "gpu".
        batch: examples of a global batch.
        steps: number of steps that are timed.
        timeout_s: time limit of a cell.
        repeats: how often each cell is measured.
        frameworks: whether every replica has a core of its own, and every step
            waits for its loss.
        rows: where the rows are, by the name of their module and their own.
    """

    device: str
    batch: int
    steps: int
    timeout_s: float
    repeats: int = 1
    frameworks: bool = False
    rows: str = "keras_towers.bench.rows:ROWS"


@dataclass
class Sample:
    """The outcome of one cell: its measurements, or an error."""

    cell: Cell
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def plan(
    rows: Mapping[str, Row],
    models: Sequence[str],
    numbers: Mapping[Runs, Sequence[int]],
    repeats: int,
) -> list[Cell]:
    """List the cells in the order to run them.

    Rows that are compared run close together in time, so that changes in the
    machine's speed affect all of them.
    """
    counts = sorted({count for some in numbers.values() for count in some})
    return [
        Cell(model, name, count, repeat)
        for repeat in range(repeats)
        for model in models
        for count in counts
        for name, row in rows.items()
        if count in numbers[row.runs]
    ]


def run_cell(row: Row, cell: Cell, setting: Setting, stored: Path) -> Sample:
    """Measure one cell; if that fails, the others are not lost with it."""
    try:
        ranks = run_workers(cell.model, stored, setting, row, cell)
        return Sample(cell, combine(ranks))
    except TowerError as error:
        return Sample(cell, error=str(error))
    except Exception as error:
        return Sample(cell, error=f"{type(error).__name__}: {error}")


def store(model: str, stored: Path, setting: Setting) -> dict[str, Any]:
    """Store the initial weights and the data of a model, in a process."""
    stored.mkdir()
    try:
        (result,) = run_workers(model, stored, setting)
    except TowerError as error:
        raise TowerError(f"cannot build {model}: {error}") from None
    if "refused" in result:
        raise TowerError(result["refused"])
    return result


def run_workers(
    model: str,
    stored: Path,
    setting: Setting,
    row: Row | None = None,
    cell: Cell | None = None,
) -> list[dict[str, Any]]:
    """Run the processes of a cell, or one that stores a model."""
    ranks, launcher = 1, list[str]()
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    if row and cell:
        environment = {"KERAS_BACKEND": row.backend}
        if row.runs is Runs.RANKS:
            ranks = cell.replicas
            command = ["-m", "keras_towers.cli.main", "run"]
            launcher = [*command, *row.launcher(ranks)]
        if setting.device == "cpu" and (ranks > 1 or setting.frameworks):
            environment |= _ONE_CORE
    with tempfile.TemporaryDirectory(prefix="keras-towers-bench-") as folder:
        task = {
            "cell": cell and asdict(cell),
            "setting": asdict(setting),
            "model": model,
            "stored": str(stored),
            "folder": folder,
        }
        # So that workers find this package, and what runs it, in any folder.
        outer = own_environment()
        path = [str(Path(__file__).parents[2]), outer.get("PYTHONPATH")]
        worker = ["-m", "keras_towers.bench.worker", json.dumps(task)]
        ended = subprocesses.run(
            [sys.executable, *launcher, *worker],
            setting.timeout_s,
            {
                "TF_CPP_MIN_LOG_LEVEL": "2",
                **outer,
                "KERAS_BACKEND": "tensorflow",
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                **environment,
            },
            grace_s=_GRACE_S,
        )
        if ended.code is None:
            raise TowerError(f"no result after {setting.timeout_s:g} seconds")
        if ended.code != 0:
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            code = f"exit code {ended.code}"
            raise TowerError("\n".join([code, *lines[-_STDERR_LINES:]]))
        left = FileStore(Path(folder))
        results = [left.get(f"{RESULT}.{rank}") for rank in range(ranks)]
        if None in results:
            raise TowerError("a process wrote no result")
        return results


def own_environment() -> dict[str, str]:
    """Return this process's variables, without those of a surrounding job."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OTHER_JOBS)
    }


def combine(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the measurements of the processes of a cell."""
    # Keys that only some workers have are kept.
    result = dict(ranks[0])
    for name in ("first_step_s", "epoch_cost_s"):
        known = [rank[name] for rank in ranks if rank[name] is not None]
        result[name] = statistics.fmean(known) if known else None
    # Shares of a global batch are equal.
    curves = zip(*(rank["losses"] for rank in ranks), strict=True)
    return result | {
        "step_ms": [ms for rank in ranks for ms in rank["step_ms"]],
        "memory_mb": sum(rank["memory_mb"] for rank in ranks),
        "losses": [statistics.fmean(losses) for losses in curves],
    }
