"""One process that measures one cell."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_towers.bench.models import Stored, Workload
from keras_towers.bench.rows import Row, Runs, Trainer, find
from keras_towers.bench.runner import FIRST_STEPS, RESULT, Cell, Setting
from keras_towers.errors import TowerError
from keras_towers.rendezvous import tf_config
from keras_towers.rendezvous.store import FileStore

# For towers that take batches in bursts: the number of batches per tower over
# which one time is measured.
ROUNDS = 3
# The first steps of an epoch fill the queues of the input pipeline.
_SETTLING_STEPS = 3
_SHORT_EPOCHS, _SKIPPED_EPOCHS, _SHORT_EPOCH_STEPS = 5, 2, 4
_POLL_S = 0.005


def main() -> None:
    """Run the task of the command line: measure a cell, or store a model."""
    task = json.loads(sys.argv[1])
    setting, folder = Setting(**task["setting"]), Path(task["folder"])
    model, rank = Stored(task["model"], Path(task["stored"])), 0
    result: dict[str, Any]
    if task["cell"] is None:
        steps = steps_needed(setting.steps, 1)
        try:
            result = model.store(steps * setting.batch)
        except TowerError as error:
            result = {"refused": str(error)}
    else:
        cell = Cell(**task["cell"])
        row = find(pkgutil.resolve_name(setting.rows), cell.row)
        if row.runs is Runs.RANKS:
            place = tf_config.from_environment()
            rank = place.rank if place else int(os.environ["HOROVOD_RANK"])
        result = train(row, cell, setting, model, folder, rank)
    FileStore(folder).put(f"{RESULT}.{rank}", result)


def train(
    row: Row,
    cell: Cell,
    setting: Setting,
    model: Stored,
    folder: Path,
    rank: int = 0,
) -> dict[str, Any]:
    """Measure a row, in this process and the others concurrently."""
    size = cell.replicas if row.runs is Runs.RANKS else 1
    devices = _devices(row, cell, setting, rank)
    if row.alone:
        # Nothing connects the processes, of which TF_CONFIG tells.
        os.environ.pop("TF_CONFIG", None)
    over = ROUNDS * cell.replicas if row.bursts else 1
    steps = steps_needed(setting.steps, over)
    work = Workload(model, folder, rank, size, devices, setting.batch, steps)
    memory = Growth(work)
    with row.train(work) as trainer:
        return measure(trainer, work, memory, setting, over, row.alone)


def _devices(row: Row, cell: Cell, setting: Setting, rank: int) -> list[str]:
    """Give this process its share of the machine; return its devices."""
    ranks, in_one = row.runs is Runs.RANKS, row.runs is Runs.DEVICES
    if setting.device == "cpu":
        if ranks or setting.frameworks:
            # A core for each replica, also for its threads that communicate,
            # before the backends count the cores.
            cores = sorted(os.sched_getaffinity(0))[: cell.replicas]
            os.sched_setaffinity(0, cores)
    elif not in_one:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        gpus = visible.split(",") if visible else [*map(str, range(rank + 1))]
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    if ranks and row.backend == "tensorflow":
        return []
    return row.devices(setting.device, cell.replicas if in_one else 1)


class Growth:
    """The growth of the resident memory at its peak, counted from here on."""

    def __init__(self, work: Workload) -> None:
        # Loaded before, so that every row is charged for the model, its
        # replicas and the training alone. Keras imports TensorFlow with every
        # backend, for its random seed.
        for name in ("keras", "tensorflow"):
            importlib.import_module(name)
        _ = work.data
        with contextlib.suppress(OSError):
            # 5 sets the peak to what is resident now.
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _kilobytes("VmRSS")

    def megabytes(self) -> float:
        """Return the peak above the memory that was resident at first."""
        return (_kilobytes("VmHWM") - self._before) * 1024 / 1e6


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    size = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(size[1]) if size else 0


def steps_needed(batches: int, over: int) -> int:
    """Return the number of steps that need data."""
    return max(FIRST_STEPS, max(_SETTLING_STEPS, over) + batches + over)


def measure(
    trainer: Trainer,
    work: Workload,
    memory: Growth,
    setting: Setting,
    over: int,
    alone: bool,
) -> dict[str, Any]:
    """Train; measure the first step, later steps, and the cost of epochs.

    Args:
        trainer: trains the model.
        work: the model and its data.
        memory: what it had before.
        setting: the options of all cells.
        over: of how many steps each time is.
        alone: whether processes exchange nothing, so that each has to go on
            until all others have been measured.
    """
    store = FileStore(work.folder)

    def all_left(name: str) -> bool:
        return all(store.get(f"{name}.{r}") for r in range(work.size))

    first = trainer.train(FIRST_STEPS, 1, True)
    store.put(f"warm.{work.rank}", True)
    while not all_left("warm"):
        time.sleep(_POLL_S)
    settling = max(_SETTLING_STEPS, over)
    # On a GPU, and with JAX, a step otherwise ends before what it started.
    waits = setting.frameworks
    times = trainer.train(settling + setting.steps + over, 1, waits)
    step_ms = [1e3 * s for s in differences(times.batches[settling:], over)]
    cost_s = None
    if times.epochs:
        short = trainer.train(_SHORT_EPOCH_STEPS, _SHORT_EPOCHS, waits)
        epoch_s = differences(short.epochs)[_SKIPPED_EPOCHS:]
        steps_ms = _SHORT_EPOCH_STEPS * statistics.median(step_ms)
        cost_s = statistics.median(epoch_s) - steps_ms / 1e3
    megabytes = memory.megabytes()
    store.put(f"done.{work.rank}", True)
    while alone and not all_left("done"):
        # If a rank stopped early, the others would run on a less busy machine.
        trainer.train(_SHORT_EPOCH_STEPS, 1, waits)
    return {
        "first_step_s": first.first_step_s,
        "losses": first.losses,
        "step_ms": step_ms,
        "epoch_cost_s": cost_s,
        "memory_mb": megabytes,
        "choice": trainer.choice,
    }


def differences(times: Sequence[float], over: int = 1) -> list[float]:
    """Return seconds per step, averaged over ``over`` steps from each time."""
    pairs = zip(times, times[over:], strict=False)
    return [(end - start) / over for start, end in pairs]


if __name__ == "__main__":
    main()
