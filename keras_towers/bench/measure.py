"""What the benchmark measures in one process, and how it times it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import ADOPTED
from keras_towers.bench.trainers import Trainer

WARM_UP_BATCHES = 10
# The first steps of an epoch fill the queues of the input pipeline.
_SETTLING_BATCHES = 3
# How many batches each tower takes while one time is measured, if towers take
# them in bursts.
ROUNDS = 3
_ADOPTIONS = 4
_SHORT_EPOCHS = 5
_SHORT_EPOCH_STEPS = 4
_SKIPPED_EPOCHS = 2


def measure_training(
    trainer: Trainer,
    meeting: Meeting,
    batches: int,
    over: int = 1,
    alone: bool = False,
) -> dict[str, Any]:
    """Train, and time the steps and what an epoch costs beside them.

    Args:
        trainer: this process.
        meeting: all processes, which are timed while all of them train.
        batches: how many times to take.
        over: how many steps one time is the mean of.
        alone: whether processes exchange nothing, and so need not keep step.

    Returns:
        Milliseconds of every timed step; seconds that an epoch costs beside
        its steps, where there are epochs; the loss, by which rows can be
        checked to agree, and a few weights, by which ranks can.
    """
    if meeting.size > 1:
        # They have to wait for each other between warming up and being timed.
        trainer.train(WARM_UP_BATCHES, 1)
        meeting.exchange("warm")
    skipped = _skipped(meeting.size, over)
    times = trainer.train(skipped + batches + over, 1)
    seconds = differences(times.batches[skipped:], over)
    step_ms = [1e3 * second for second in seconds]
    cost_s = None
    if times.epochs:
        short = trainer.train(_SHORT_EPOCH_STEPS, _SHORT_EPOCHS)
        cost_s = epoch_cost_s(short.epochs, step_ms)
    witness = trainer.bias()
    meeting.leave("done")
    while alone and not meeting.complete("done"):
        # A rank that is done early would leave the others a quieter machine.
        trainer.train(_SHORT_EPOCH_STEPS, 1)
    return {
        "step_ms": step_ms,
        "epoch_cost_s": cost_s,
        "loss": times.loss,
        "choice": trainer.choice,
        "jit_compile": trainer.jit_compile(),
        "witness": witness,
    }


def steps_needed(processes: int, batches: int, over: int) -> int:
    """Return the steps that there has to be data for."""
    return max(WARM_UP_BATCHES, _skipped(processes, over) + batches + over)


def _skipped(processes: int, over: int) -> int:
    """Return how many steps of the timed run are not timed."""
    return _SETTLING_BATCHES if processes > 1 else max(WARM_UP_BATCHES, over)


def differences(times: Sequence[float], over: int = 1) -> list[float]:
    """Return the seconds of one step between each time and a later one.

    Towers that wait for nobody take batches in bursts: only ``over`` several
    rounds of them is a mean a rate.
    """
    pairs = zip(times, times[over:], strict=False)
    return [(end - start) / over for start, end in pairs]


def epoch_cost_s(epochs: Sequence[float], step_ms: Sequence[float]) -> float:
    """Return the seconds that a short epoch costs beside its steps."""
    steps_s = _SHORT_EPOCH_STEPS * statistics.median(step_ms) / 1e3
    return statistics.median(differences(epochs)[_SKIPPED_EPOCHS:]) - steps_s


def measure_adoption(
    make_strategy: Callable[[Sequence[str]], Any], devices: Sequence[str]
) -> dict[str, Any]:
    """Time a strategy taking a model of about 100 MB over and giving it back.

    Returns:
        Seconds to adopt, to release, and to copy the same bytes once in
        numpy, each a list with one number for every time; and the bytes.
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
