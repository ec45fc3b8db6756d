"""Measure one row of several processes, in one of them.

Usage:
    keras-towers run -np 2 -m keras_towers.cli.bench_rank \
        --row strategy --model large --folder EMPTY_FOLDER

What was measured is left in the folder, a file for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from keras_towers.cli import bench_timing
from keras_towers.cli.bench_meeting import Meeting
from keras_towers.cli.bench_models import MODELS
from keras_towers.cli.bench_rows import COMPUTE_ROWS, ROWS
from keras_towers.cli.bench_trainers import Share, Trainer, trainer

RESULT = "result"
# The first steps of an epoch fill the queues of the input pipeline.
_SETTLING_BATCHES = 3


def measure(
    trained: Trainer, meeting: Meeting, batches: int, alone: bool
) -> dict[str, Any]:
    """Train, and time the steps and what an epoch costs beside them.

    Args:
        trained: this rank.
        meeting: all ranks, which are timed while all of them train.
        batches: how many steps to time.
        alone: whether the ranks exchange nothing, and so need not keep step.

    Returns:
        Milliseconds of every timed step; seconds that an epoch costs beside
        its steps, where there are epochs; the loss; and a few weights.
    """
    trained.train(bench_timing.WARM_UP_BATCHES)
    meeting.exchange("warm")
    times = trained.train(_timed_steps(batches))
    seconds = bench_timing.differences(times.batches)[_SETTLING_BATCHES:]
    result = {
        "step_ms": [1e3 * second for second in seconds],
        "epoch_cost_s": None,
        "loss": times.loss,
        "how": trained.how,
    }
    if times.epochs:
        short = trained.train(
            bench_timing.SHORT_EPOCH_STEPS, bench_timing.SHORT_EPOCHS
        )
        result["epoch_cost_s"] = bench_timing.epoch_cost_s(
            short.epochs, result["step_ms"]
        )
    result["witness"] = trained.witness()
    meeting.leave("done")
    while alone and not meeting.complete("done"):
        # A rank that is done early would leave the others a quieter machine.
        trained.train(bench_timing.SHORT_EPOCH_STEPS)
    return result


def steps_needed(batches: int) -> int:
    """How many steps there has to be data for."""
    return max(bench_timing.WARM_UP_BATCHES, _timed_steps(batches))


def _timed_steps(batches: int) -> int:
    # A step is timed from its begin to the begin of the next.
    return _SETTLING_BATCHES + batches + 1


def main() -> None:
    """Be the rank that the environment says."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_towers.cli.bench_rank",
        description="Measure one row of several processes, in one of them.",
    )
    parser.add_argument("--row", choices=ROWS, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    meeting = Meeting(
        arguments.folder,
        int(os.environ["HOROVOD_RANK"]),
        int(os.environ["HOROVOD_SIZE"]),
    )
    # As many cores as ranks, also for the threads that communicate: with
    # others free those would cost nothing. Before TensorFlow counts them.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: meeting.size])
    share = Share(
        MODELS[arguments.model],
        meeting,
        arguments.batch_size,
        steps_needed(arguments.batches),
    )
    alone = arguments.row in COMPUTE_ROWS
    with trainer(arguments.row, share) as trained:
        result = measure(trained, meeting, arguments.batches, alone)
    meeting.leave(RESULT, json.dumps(result))


if __name__ == "__main__":
    main()
