"""What the benchmark measures in one process, and how it times it."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers.bench.meeting import Meeting
from keras_towers.bench.memory import Growth
from keras_towers.bench.models import ADOPTED
from keras_towers.bench.trainers import Trainer, Workload

WARM_UP_BATCHES = 10
# The first steps of an epoch fill the queues of the input pipeline.
_SETTLING_BATCHES = 3
# For towers that take batches in bursts: the number of batches per tower over
# which one time is measured.
ROUNDS = 3
_ADOPTIONS = 4
_SHORT_EPOCHS = 5
_SHORT_EPOCH_STEPS = 4
_SKIPPED_EPOCHS = 2


def watch_memory(work: Workload, frameworks: Sequence[str]) -> Growth:
    """Start to watch memory: call this before a row builds its model.

    Frameworks and data are loaded before, so that every row is charged for the
    model, its replicas and the training alone.

    Args:
        work: what the row trains.
        frameworks: the modules that the row's process imports anyway.
    """
    for name in frameworks:
        importlib.import_module(name)
    work.data()
    return Growth()


def measure_training(
    trainer: Trainer,
    meeting: Meeting,
    memory: Growth,
    batches: int,
    over: int = 1,
    alone: bool = False,
    first_steps: int = WARM_UP_BATCHES,
) -> dict[str, Any]:
    """Train, and measure the first step, later ones, and what epochs add.

    Args:
        trainer: trains in this process.
        meeting: all processes; each is timed while all of them train.
        memory: the growth of memory since before the model was built.
        batches: the number of times to measure.
        over: the number of steps over which each time is averaged.
        alone: whether processes exchange nothing, and so are not in lockstep.
        first_steps: the number of steps before those, whose losses are
            recorded.

    Returns:
        Seconds until the end of the first step, with everything that is
        compiled for it; milliseconds of every timed step; the per-epoch
        overhead in seconds, if there are epochs; the growth of memory, at its
        peak, in megabytes; the loss, to check that rows agree; and a few
        weights, to check that ranks agree.
    """
    first = trainer.train(first_steps, 1)
    if meeting.size > 1:
        meeting.exchange("warm")
    skipped = _skipped(over)
    times = trainer.train(skipped + batches + over, 1)
    seconds = differences(times.batches[skipped:], over)
    step_ms = [1e3 * second for second in seconds]
    cost_s = None
    if times.epochs:
        short = trainer.train(_SHORT_EPOCH_STEPS, _SHORT_EPOCHS)
        cost_s = epoch_cost_s(short.epochs, step_ms)
    megabytes = memory.megabytes()
    witness = trainer.witness()
    meeting.leave("done")
    while alone and not meeting.complete("done"):
        # If a rank stopped early, the others would run on a less busy machine.
        trainer.train(_SHORT_EPOCH_STEPS, 1)
    return {
        "first_step_s": first.first_step_s,
        "first_losses": first.losses,
        "step_ms": step_ms,
        "epoch_cost_s": cost_s,
        "memory_mb": megabytes,
        "loss": times.loss,
        "choice": trainer.choice,
        "jit_compile": trainer.jit_compile(),
        "witness": witness,
    }


def steps_needed(
    batches: int, over: int, first_steps: int = WARM_UP_BATCHES
) -> int:
    """Return the number of steps that need data."""
    return max(first_steps, _skipped(over) + batches + over)


def _skipped(over: int) -> int:
    """Return the number of untimed steps at the start of the timed run."""
    return max(_SETTLING_BATCHES, over)


def differences(times: Sequence[float], over: int = 1) -> list[float]:
    """Return seconds per step, averaged over ``over`` steps from each time.

    Asynchronous towers take batches in bursts, so only a mean over several
    rounds is a meaningful rate.
    """
    pairs = zip(times, times[over:], strict=False)
    return [(end - start) / over for start, end in pairs]


def epoch_cost_s(epochs: Sequence[float], step_ms: Sequence[float]) -> float:
    """Return the overhead of a short epoch in seconds."""
    steps_s = _SHORT_EPOCH_STEPS * statistics.median(step_ms) / 1e3
    return statistics.median(differences(epochs)[_SKIPPED_EPOCHS:]) - steps_s


def measure_adoption(
    make_strategy: Callable[[Sequence[str]], Any], devices: Sequence[str]
) -> dict[str, Any]:
    """Time how long a strategy takes to adopt and release a 100 MB model.

    Returns:
        Lists of the seconds to adopt it, to release it, and to copy the same
        bytes once with numpy; and the number of bytes.
    """
    model = ADOPTED.build()
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    arrays = [variable.numpy() for variable in variables]
    adopt_s, release_s, copy_s = [], [], []
    for _ in range(_ADOPTIONS):
        start = time.perf_counter()
        copies = [array.copy() for array in arrays]
        copy_s.append(time.perf_counter() - start)
        del copies
        start = time.perf_counter()
        with make_strategy(devices) as towers:
            towers.adopt(model)
            end = time.perf_counter()
            adopt_s.append(end - start)
        release_s.append(time.perf_counter() - end)
    return {
        "bytes": sum(array.nbytes for array in arrays),
        "adopt_s": adopt_s,
        "release_s": release_s,
        "copy_s": copy_s,
    }
