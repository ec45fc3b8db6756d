"""Measures one cell, in one of its processes.

``runner`` starts it, with the cell and the setting as JSON. What was measured
is left in a folder, a file for each process. Fresh processes for every cell,
because TensorFlow's devices and threads can be set only once, and a strategy
leaves traces for the next.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from keras_towers.bench import machine, measure
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import MODELS
from keras_towers.bench.plan import ADOPTION, Cell, Setting
from keras_towers.bench.trainers import Share

RESULT = "result"


def train(
    cell: Cell, setting: Setting, meeting: Meeting, devices: list[str]
) -> dict[str, Any]:
    """Measure how a row trains, in this process and the others at once."""
    row = cell.suite.rows[cell.row]
    over = measure.ROUNDS * len(devices) if row.bursts else 1
    steps = measure.steps_needed(meeting.size, setting.batches, over)
    share = Share(MODELS[cell.model], meeting, devices, setting.batch, steps)
    with row.train(share) as trainer:
        return measure.measure_training(
            trainer, meeting, setting.batches, over, alone=row.alone is None
        )


def main() -> None:
    """Be the process that the environment says."""
    task = json.loads(sys.argv[1])
    cell, setting = Cell(**task["cell"]), Setting(**task["setting"])
    # The launcher says which rank this is; one process has none.
    rank = int(os.environ["HOROVOD_RANK"]) if cell.processes > 1 else 0
    meeting = Meeting(Path(task["folder"]), rank, cell.processes)
    devices = []
    if meeting.size > 1:
        # As many cores as ranks, also for the threads that communicate: with
        # others free those would cost nothing. Before TensorFlow counts them.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: meeting.size])
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
