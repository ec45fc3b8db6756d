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
from keras_towers.bench.rows import Row, Runs, Train, find_row
from keras_towers.bench.runner import FIRST_STEPS, RESULT, Cell, Setting
from keras_towers.rendezvous import tf_config
from keras_towers.rendezvous.store import FileStore

# If towers take batches in bursts, the number of batches per tower that one
# measured time covers.
_ROUNDS = 3
# The first steps of an epoch fill the queues of the input pipeline.
_SETTLING_STEPS = 3
_SHORT_EPOCHS, _SKIPPED_EPOCHS, _SHORT_EPOCH_STEPS = 5, 2, 4
_POLL_S = 0.005


def main() -> None:
    """Measure the cell of the command line, as one process of its job."""
    task = json.loads(sys.argv[1])
    setting, cell = Setting(**task["setting"]), Cell(**task["cell"])
    folder, rank, size = Path(task["folder"]), 0, 1
    row = find_row(pkgutil.resolve_name(setting.rows), cell.row)
    if row.runs is Runs.RANKS:
        place = tf_config.from_environment()
        rank = place.rank if place else int(os.environ["HOROVOD_RANK"])
        size = cell.replicas
    if row.alone:
        # No strategy connects the processes that TF_CONFIG describes.
        os.environ.pop(tf_config.VARIABLE, None)
    window = _ROUNDS * cell.replicas if row.bursts else 1
    work = Workload(
        Stored(cell.model, Path(task["stored"])),
        folder,
        rank,
        size,
        _devices(row, cell, setting, rank),
        setting.batch,
        max(FIRST_STEPS, _SETTLING_STEPS + setting.steps + 2 * window),
    )
    # Loaded before memory is measured, so that every row is charged for the
    # model, its replicas and the training alone. Keras imports TensorFlow with
    # every backend, for its random seed.
    for name in ("keras", "tensorflow"):
        importlib.import_module(name)
    _ = work.data
    before = reset_peak_memory()
    with row.train(work) as train:
        result = measure(train, work, setting, window, row.alone)
        result["memory_mb"] = peak_memory() - before
    FileStore(folder).put(f"{RESULT}.{rank}", result)


def _devices(row: Row, cell: Cell, setting: Setting, rank: int) -> list[str]:
    """Give this process its share of the machine; return its devices."""
    ranks, in_one = row.runs is Runs.RANKS, row.runs is Runs.DEVICES
    if setting.device == "cpu":
        if ranks or setting.exact:
            # One core for each replica and its communication threads; set
            # before the backends count the cores.
            cores = sorted(os.sched_getaffinity(0))[: cell.replicas]
            os.sched_setaffinity(0, cores)
    elif not in_one:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        gpus = visible.split(",") if visible else [*map(str, range(rank + 1))]
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    if ranks and row.backend == "tensorflow":
        return []
    number = cell.replicas if in_one else 1
    if setting.memory_limit:
        from keras_towers.devices import virtual_towers

        return virtual_towers(number, setting.memory_limit)
    return row.devices(setting.device, number)


def reset_peak_memory() -> float:
    """Return the resident megabytes; from now on they are also the peak."""
    with contextlib.suppress(OSError):
        # 5 resets the peak to the current resident memory.
        Path("/proc/self/clear_refs").write_text("5")
    return _megabytes("VmRSS")


def peak_memory() -> float:
    """Return the most resident megabytes since ``reset_peak_memory``."""
    return _megabytes("VmHWM")


def _megabytes(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    size = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(size[1]) * 1024 / 1e6 if size else 0.0


def measure(
    train: Train, work: Workload, setting: Setting, window: int, alone: bool
) -> dict[str, Any]:
    """Train; measure the first step, later steps, and the cost of epochs.

    Args:
        train: trains the model.
        work: the model and its data.
        setting: the options of all cells.
        window: the number of steps that each time is averaged over.
        alone: whether processes exchange nothing; each then has to continue
            until all have been measured.
    """
    store = FileStore(work.folder)

    def all_stored(name: str) -> bool:
        return all(store.get(f"{name}.{r}") for r in range(work.size))

    first = train(FIRST_STEPS, 1, True)
    store.put(f"warm.{work.rank}", True)
    while not all_stored("warm"):
        time.sleep(_POLL_S)
    # On GPUs and with JAX, a step otherwise ends before its computation.
    waits = setting.exact
    settling = max(_SETTLING_STEPS, window)
    times = train(settling + setting.steps + window, 1, waits)
    step_s = statistics.median(differences(times.batches[settling:], window))
    cost_s = None
    if times.epochs:
        short = train(_SHORT_EPOCH_STEPS, _SHORT_EPOCHS, waits)
        epoch_s = differences(short.epochs)[_SKIPPED_EPOCHS:]
        cost_s = statistics.median(epoch_s) - _SHORT_EPOCH_STEPS * step_s
    store.put(f"done.{work.rank}", True)
    while alone and not all_stored("done"):
        # If a rank stopped early, the other ranks would run faster.
        train(_SHORT_EPOCH_STEPS, 1, waits)
    return {
        "first_step_s": first.first_step_s,
        "losses": first.losses,
        "step_ms": 1e3 * step_s,
        "epoch_cost_s": cost_s,
    }


def differences(times: Sequence[float], over: int = 1) -> list[float]:
    """Return seconds per step, averaged over ``over`` steps from each time."""
    pairs = zip(times, times[over:], strict=False)
    return [(end - start) / over for start, end in pairs]


if __name__ == "__main__":
    main()
