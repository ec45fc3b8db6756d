"""A process that measures one cell: trains, and takes the times."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from keras_towers.foundation.object_types import JsonObject
from keras_towers.foundation.system import resident_bytes
from keras_towers.inspection.bench.models import Stored, Workload
from keras_towers.inspection.bench.rows import Row, Runs, Train, find_row
from keras_towers.inspection.bench.runner import (
    FIRST_STEPS,
    RESULT,
    Cell,
    Setting,
)
from keras_towers.jobs.rendezvous import tf_config
from keras_towers.jobs.rendezvous.file_store import FileStore

# Asynchronous towers take batches in bursts: so many batches of each tower are
# in one measured time.
_ROUNDS = 3
# The first steps of an epoch fill the queues of the input pipeline.
_SETTLING_STEPS = 3
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
    window = _ROUNDS * cell.replicas
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
        result = measure(train, work, setting, window)
        result["memory_mb"] = peak_memory() - before
        state_mb = result.pop("state_bytes") / 1e6
        result["memory_to_state"] = result["memory_mb"] / state_mb
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
        if setting.device == "cpu" and row.towers > 1:
            from keras_towers.transport.devices import virtual_towers

            virtual_towers(row.towers)
        return []
    number = cell.replicas if in_one else 1
    if setting.memory_limit:
        from keras_towers.transport.devices import virtual_towers

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
    return (resident_bytes(field) or 0) / 1e6


def measure(
    train: Train, work: Workload, setting: Setting, window: int
) -> JsonObject:
    """Train, and measure the first step and later steps.

    Args:
        train: trains the model.
        work: the model and its data.
        setting: the options of all cells.
        window: the number of steps that each time is averaged over.
    """
    first = train(FIRST_STEPS, True)
    wait_for_all(work, "warm")
    # On GPUs and with JAX, a step otherwise ends before its computation.
    settling = max(_SETTLING_STEPS, window)
    times = train(settling + setting.steps + window, setting.exact)
    step_s = statistics.median(differences(times.batches[settling:], window))
    return {
        "first_step_s": first.first_step_s,
        "losses": first.losses,
        "state_bytes": first.state_bytes,
        "step_ms": 1e3 * step_s,
    }


def wait_for_all(
    work: Workload, name: str, meanwhile: Callable[[], object] | None = None
) -> None:
    """Wait until all processes of the cell have come here.

    Args:
        work: this process.
        name: of this place.
        meanwhile: what to repeat until then; None: wait.
    """
    store = FileStore(work.folder)
    store.put(f"{name}.{work.rank}", True)
    while not all(store.get(f"{name}.{r}") for r in range(work.size)):
        if meanwhile is None:
            time.sleep(_POLL_S)
        else:
            meanwhile()


def differences(times: Sequence[float], over: int) -> list[float]:
    """Return seconds per step, averaged over ``over`` steps from each time."""
    pairs = zip(times, times[over:], strict=False)
    return [(end - start) / over for start, end in pairs]


if __name__ == "__main__":
    main()
