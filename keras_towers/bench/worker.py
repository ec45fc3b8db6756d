"""Measures one cell, in one of its processes.

``runner`` starts it with the cell and the setting as JSON. Each process writes
its measurements to a file in a folder. Every cell gets fresh processes, because
TensorFlow's devices and threads can be set only once, and a strategy might
affect the next one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from keras_towers.bench import machine, measure
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import MODELS
from keras_towers.bench.plan import ADOPTION, Cell, Setting
from keras_towers.bench.trainers import Workload

RESULT = "result"


def train(
    cell: Cell, setting: Setting, meeting: Meeting, devices: list[str]
) -> dict[str, Any]:
    """Measure a row, in this process and the others concurrently."""
    row = cell.suite.rows[cell.row]
    over = measure.ROUNDS * len(devices) if row.bursts else 1
    steps = measure.steps_needed(setting.batches, over)
    work = Workload(MODELS[cell.model], meeting, devices, setting.batch, steps)
    framework = "torch" if row.needs == "torch" else "keras"
    memory = measure.watch_memory(work, [framework])
    with row.train(work) as trainer:
        return measure.measure_training(
            trainer,
            meeting,
            memory,
            setting.batches,
            over,
            alone=row.alone is None,
        )


def main() -> None:
    """Run the task given on the command line."""
    given = json.loads(sys.argv[1])
    cell, setting = Cell(**given["cell"]), Setting(**given["setting"])
    rank = machine.own_rank(cell.processes)
    meeting = Meeting(Path(given["folder"]), rank, cell.processes)
    devices = []
    if meeting.size > 1:
        machine.use_cores(meeting.size)
    else:
        devices = machine.prepare_devices(setting.device, cell.replicas)
    strategy = cell.suite.rows[cell.row].strategy
    if cell.kind == ADOPTION and strategy:
        result = measure.measure_adoption(strategy, devices)
    else:
        result = train(cell, setting, meeting, devices)
    meeting.leave(RESULT, json.dumps(result))


if __name__ == "__main__":
    main()
