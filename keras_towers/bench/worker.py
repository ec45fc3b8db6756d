"""One process that measures one cell.

Every cell gets fresh processes, because TensorFlow's devices and threads can be
set only once, and a strategy might affect the next one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_towers.bench import machine
from keras_towers.bench.measure import ROUNDS, Growth, measure, steps_needed
from keras_towers.bench.models import Stored
from keras_towers.bench.rows import ROWS, Row, Runs, find
from keras_towers.bench.runner import RESULT, Cell, Setting
from keras_towers.bench.trainers import Workload
from keras_towers.errors import TowerError
from keras_towers.meeting.store import FileStore


def train(
    row: Row, cell: Cell, setting: Setting, model: Stored, folder: Path
) -> dict[str, Any]:
    """Measure a row, in this process and the others concurrently."""
    size = cell.replicas if row.runs is Runs.RANKS else 1
    rank = machine.own_rank(size)
    devices = _devices(row, cell, setting, rank)
    if row.alone:
        # Nothing connects the processes, of which TF_CONFIG tells.
        os.environ.pop("TF_CONFIG", None)
    over = ROUNDS * cell.replicas if row.bursts else 1
    work = Workload(
        model,
        folder,
        rank,
        size,
        devices,
        setting.batch,
        steps_needed(setting.batches, over),
        waits=setting.frameworks,
    )
    # Keras imports TensorFlow with every backend, for its random seed.
    memory = Growth(work, ["keras", "tensorflow"])
    with row.train(work) as trainer:
        return measure(trainer, work, memory, setting.batches, over, row.alone)


def _devices(row: Row, cell: Cell, setting: Setting, rank: int) -> list[str]:
    """Give this process its share of the machine; return its devices."""
    ranks, in_one = row.runs is Runs.RANKS, row.runs is Runs.DEVICES
    if setting.device == "cpu":
        if ranks or setting.frameworks:
            machine.use_cores(cell.replicas)
    elif not in_one:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        gpus = visible.split(",") if visible else [*map(str, range(rank + 1))]
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    if ranks and row.backend == "tensorflow":
        return []
    return row.devices(setting.device, cell.replicas if in_one else 1)


def main(rows: Mapping[str, Row] = ROWS) -> None:
    """Run the task of the command line: measure a cell, or store a model."""
    task = json.loads(sys.argv[1])
    setting, folder = Setting(**task["setting"]), Path(task["folder"])
    model, rank = Stored(task["model"], Path(task["stored"])), 0
    result: dict[str, Any]
    if task["cell"] is None:
        try:
            result = model.store(
                steps_needed(setting.batches, 1) * setting.batch
            )
        except TowerError as error:
            result = {"refused": str(error)}
    else:
        cell = Cell(**task["cell"])
        row = find(rows, cell.row)
        rank = machine.own_rank(cell.replicas if row.runs is Runs.RANKS else 1)
        result = train(row, cell, setting, model, folder)
    FileStore(folder).put(f"{RESULT}.{rank}", result)


if __name__ == "__main__":
    main()
