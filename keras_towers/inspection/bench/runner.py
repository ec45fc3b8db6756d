"""Runs the cells of a benchmark, each in fresh processes with a time limit.

``cell_process.py`` is what these processes run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from keras_towers.foundation import commands, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import JsonObject
from keras_towers.foundation.system import handle_signals
from keras_towers.inspection.bench.rows import Row, Runs
from keras_towers.jobs.rendezvous import tf_config
from keras_towers.jobs.rendezvous.file_store import FileStore
from keras_towers.jobs.rendezvous.launchers import Horovodrun

# The first steps wait for their losses.
FIRST_STEPS = 20
RESULT = "result"
"""Followed by a rank: the key under which this rank stores its result."""
# Relative to plain Keras's loss. A different order of summation stays far below
# it; a mean over other examples, or another optimizer, is far above.
TOLERANCE = 1e-3
_STDERR_LINES = 12
# The launcher needs time to end its ranks.
_GRACE_S = 15
# With more threads, a single rank would use all cores.
_ONE_CORE = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
}
# Variables of the job that this command itself may run in.
_OUTER_JOB = (
    "HOROVOD_ELASTIC",
    Horovodrun.rank_in,
    settings.ENV_SECRET,
    settings.ENV_STORE,
    tf_config.VARIABLE,
)


@dataclass(frozen=True)
class Cell:
    """One measurement, in fresh processes."""

    model: str
    row: str
    replicas: int
    repeat: int

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
        batch: examples in a global batch.
        steps: number of steps that are timed.
        timeout_s: time limit of a cell.
        exact: whether a row fails if its losses differ from plain Keras's; then
            every step waits for its loss, and every replica has its own core.
        rows: the rows, as the names of a module and of its attribute.
        memory_limit: MiB of each logical GPU that the towers of a process are;
            None: each tower has a GPU.
    """

    device: str
    batch: int
    steps: int
    timeout_s: float
    exact: bool = False
    rows: str = "keras_towers.inspection.bench.rows:ROWS"
    memory_limit: int | None = None


@dataclass
class Sample:
    """The outcome of one cell: its measurements, or an error."""

    cell: Cell
    result: JsonObject = field(default_factory=dict)
    error: str = ""


@dataclass
class Result:
    """All repeats of a row.

    Attributes:
        model: the name of its model.
        replicas: its number of replicas.
        row: its name.
        figures: a value for each repeat that did not fail, by column.
        error: why a repeat failed; empty if none did.
    """

    model: str
    replicas: int
    row: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""


@dataclass
class Measurements:
    """The titles of the models, and the samples of all cells.

    Attributes:
        complete: whether all cells were measured, without an interrupt.
    """

    titles: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    complete: bool = False

    def has_failed(self, cell: Cell) -> bool:
        """Whether a run of the same row, model and number has failed."""
        return any(s.error and s.cell.title == cell.title for s in self.samples)

    def add(self, sample: Sample, compares: bool) -> None:
        """Add a sample.

        Args:
            sample: the sample, which fails if its losses are wrong.
            compares: whether they have to be those of plain Keras.
        """
        self.samples.append(sample)
        if not compares or sample.error:
            return
        plain = replace(sample.cell, row="plain", replicas=1)
        curves = [
            other.result["losses"]
            for other in self.samples
            if other.cell == plain and not other.error
        ]
        reference = curves[0] if curves else ()
        sample.error = difference(sample.result["losses"], reference)


def plan_cells(
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


def measure_all(
    cells: Sequence[Cell],
    rows: Mapping[str, Row],
    setting: Setting,
    console: Console,
) -> Measurements:
    """Measure all cells until Ctrl-C; skip repeats of a row that failed."""
    measurements = Measurements()
    # On SIGTERM, end exactly as on Ctrl-C.
    sigterm = handle_signals([signal.SIGTERM], signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="keras-towers-") as name, sigterm:
        try:
            _measure(measurements, cells, rows, setting, console, Path(name))
            measurements.complete = True
        except KeyboardInterrupt:
            done = f"{len(measurements.samples)} of {len(cells)} runs made."
            console.print(f"Interrupted: {done}")
    return measurements


def _measure(
    measurements: Measurements,
    cells: Sequence[Cell],
    rows: Mapping[str, Row],
    setting: Setting,
    console: Console,
    folder: Path,
) -> None:
    """Measure all cells, with a progress bar; models are stored in a folder."""
    models = dict.fromkeys(cell.model for cell in cells)
    stored = {m: folder / str(number) for number, m in enumerate(models)}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("models", total=len(cells))
        for model, path in stored.items():
            measurements.titles[model] = store(model, path, setting)
        for number, cell in enumerate(cells):
            title = f"{cell.title} ({number + 1} of {len(cells)})"
            bar.update(task, completed=number, description=title)
            # A repeat would use up the time limit again.
            if measurements.has_failed(cell):
                continue
            if not console.is_terminal:
                console.print(title, style="dim")
            row = rows[cell.row]
            sample = run_cell(row, cell, setting, stored[cell.model])
            measurements.add(sample, compares=setting.exact and row.exact)


def difference(losses: Sequence[float], reference: Sequence[float]) -> str:
    """Say where two curves differ first, or nothing if they agree.

    The whole beginning of the curve has to agree, because a wrong mean over
    replicas shows in the second step.

    Args:
        losses: the mean loss over the global batch, for each step.
        reference: the losses to compare with; empty: plain Keras failed.

    Example:
        >>> difference([2.3, 1.0], [2.3, 2.1])
        'loss differs from step 2 on (1 against 2.1)'
    """
    if not reference:
        return "plain Keras failed"
    pairs = zip(losses, reference, strict=True)
    for step, (loss, wanted) in enumerate(pairs, 1):
        # Infinities do not count as equal, and NaN equals nothing.
        close = math.isclose(loss, wanted, rel_tol=TOLERANCE)
        if not (math.isfinite(wanted) and close):
            shown = f"{loss:.7g} against {wanted:.7g}"
            return f"loss differs from step {step} on ({shown})"
    return ""


def store(model: str, folder: Path, setting: Setting) -> str:
    """Store a model's initial weights and data; return its title."""
    command = ["-m", "keras_towers.inspection.bench.models", model, str(folder)]
    # Used if the model comes without data.
    examples = (FIRST_STEPS + setting.steps) * setting.batch
    try:
        answer = commands.ask_python(
            [*command, str(examples)],
            setting.timeout_s,
            environment({"CUDA_VISIBLE_DEVICES": ""}),
        )
    except commands.NoAnswer as error:
        raise TowerError(f"cannot build {model}: it {error}") from None
    if "refused" in answer:
        raise TowerError(answer["refused"])
    return str(answer["title"])


def run_cell(row: Row, cell: Cell, setting: Setting, stored: Path) -> Sample:
    """Measure one cell; a failure becomes part of the sample."""
    try:
        return Sample(cell, combine(run_workers(row, cell, setting, stored)))
    except TowerError as error:
        return Sample(cell, error=str(error))


def run_workers(
    row: Row, cell: Cell, setting: Setting, stored: Path
) -> list[JsonObject]:
    """Run the processes of a cell; return the measurements of each."""
    ranks, launcher = 1, list[str]()
    if row.runs is Runs.RANKS:
        ranks = cell.replicas
        command = ["-m", "keras_towers.cli.main", "run"]
        launcher = [*command, *row.launcher(ranks)]
    variables = {"KERAS_BACKEND": row.backend}
    if setting.device == "cpu" and (ranks > 1 or setting.exact):
        variables |= _ONE_CORE
    with tempfile.TemporaryDirectory(prefix="keras-towers-bench-") as folder:
        task = {
            "cell": asdict(cell),
            "setting": asdict(setting),
            "stored": str(stored),
            "folder": folder,
        }
        worker = [
            "-m",
            "keras_towers.inspection.bench.cell_process",
            json.dumps(task),
        ]
        ended = commands.run_command(
            [sys.executable, *launcher, *worker],
            setting.timeout_s,
            environment(variables),
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


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process outside of any outer job."""
    outer = {k: v for k, v in os.environ.items() if k not in _OUTER_JOB}
    # This package may not be installed.
    path = [str(Path(__file__).parents[3]), outer.get("PYTHONPATH")]
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **outer,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        settings.ENV_RANK: "0",
        settings.ENV_SIZE: "1",
        **more,
    }


def combine(ranks: Sequence[JsonObject]) -> JsonObject:
    """Combine the measurements of the processes of a cell.

    Times are means over the processes, and memory is their total; relative to
    the state it is that of the process with most. Losses are means, too:
    processes have equal shares of the global batch.
    """

    def mean(name: str) -> float:
        return statistics.fmean(rank[name] for rank in ranks)

    curves = zip(*(rank["losses"] for rank in ranks), strict=True)
    return {
        "step_ms": mean("step_ms"),
        "first_step_s": mean("first_step_s"),
        "memory_mb": sum(rank["memory_mb"] for rank in ranks),
        "memory_to_state": max(rank["memory_to_state"] for rank in ranks),
        "losses": [statistics.fmean(losses) for losses in curves],
    }
