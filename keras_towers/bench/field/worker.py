"""Measures one cell of the field, in one of its processes.

``runner`` starts it with the cell and the setting as JSON, or with the model to
store. Each process writes its measurements, or an error of the user's model, to
a file in a folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from keras_towers.bench import machine, measure
from keras_towers.bench.field import curves, rivals
from keras_towers.bench.field.models import Stored
from keras_towers.bench.field.plan import FieldCell
from keras_towers.bench.field.rows import REFERENCE, Runs
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.plan import Setting
from keras_towers.bench.trainers import Workload, fit
from keras_towers.bench.worker import RESULT
from keras_towers.errors import TowerError


def steps_needed(setting: Setting) -> int:
    """Return the number of steps that need data."""
    return measure.steps_needed(setting.batches, 1, curves.STEPS)


def train(
    cell: FieldCell, setting: Setting, meeting: Meeting, model: Stored
) -> dict[str, Any]:
    """Measure a row, in this process and the others concurrently."""
    row = cell.field_row
    devices = _prepare(cell, setting.device, meeting.rank)
    work = Workload(
        model,
        meeting,
        devices,
        setting.batch // meeting.size,
        steps_needed(setting),
        waits=True,
    )
    # Keras imports TensorFlow with every backend, for its random seed.
    memory = measure.watch_memory(work, ["keras", "tensorflow"])
    with row.train(work) as trainer:
        result = measure.measure_training(
            trainer,
            meeting,
            memory,
            setting.batches,
            alone=not row.listed,
            first_steps=curves.STEPS,
        )
    if row.name == REFERENCE:
        frozen = fit(work, model.build(curves.frozen))
        result["frozen_losses"] = frozen.train(curves.STEPS, 1).losses
    return result


def _prepare(cell: FieldCell, device: str, rank: int) -> list[str]:
    """Give this process its share of the machine; return its devices."""
    row = cell.field_row
    if device == "cpu":
        machine.use_cores(cell.replicas)
    elif row.runs is not Runs.DEVICES:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = (
            visible.split(",") if visible else [str(n) for n in range(rank + 1)]
        )
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    if row.backend != "tensorflow":
        if device == "gpu":
            needed = cell.replicas if row.runs is Runs.DEVICES else 1
            rivals.check_gpus(row.backend, needed)
        return [f"{device}:{index}" for index in range(cell.replicas)]
    if cell.processes > 1:
        return []
    return machine.prepare_devices(device, cell.replicas)


def main() -> None:
    """Run the task given on the command line."""
    given = json.loads(sys.argv[1])
    setting = Setting(**given["setting"])
    model = Stored(given["model"], Path(given["stored"]))
    folder = Path(given["folder"])
    if given["cell"] is None:
        try:
            result = model.store(steps_needed(setting) * setting.batch)
        except TowerError as error:
            result = {"refused": str(error)}
        Meeting(folder, 0, 1).leave(RESULT, json.dumps(result))
        return
    cell = FieldCell(**given["cell"])
    rank = machine.own_rank(cell.processes)
    if cell.processes > 1:
        # Rows make clusters of their own, of which TensorFlow must not be told
        # another when Keras is imported before.
        os.environ.pop("TF_CONFIG", None)
    meeting = Meeting(folder, rank, cell.processes)
    result = train(cell, setting, meeting, model)
    meeting.leave(RESULT, json.dumps(result))


if __name__ == "__main__":
    main()
