"""The measurements of one process."""

from __future__ import annotations

import contextlib
import importlib
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_towers.bench.trainers import Trainer, Workload
from keras_towers.meeting.store import FileStore

# The first steps, each of which waits for its loss.
FIRST_STEPS = 20
# For towers that take batches in bursts: the number of batches per tower over
# which one time is measured.
ROUNDS = 3
# The first steps of an epoch fill the queues of the input pipeline.
_SETTLING_STEPS = 3
_SHORT_EPOCHS, _SKIPPED_EPOCHS, _SHORT_EPOCH_STEPS = 5, 2, 4
_POLL_S = 0.005
_WITNESSES = 1000


class Growth:
    """The growth of the resident memory at its peak, counted from here on.

    Args:
        work: what is trained from now on; its data are loaded before.
        frameworks: the modules that the process imports anyway. So every row is
            charged for the model, its replicas and the training alone.
    """

    def __init__(self, work: Workload, frameworks: Sequence[str]) -> None:
        for name in frameworks:
            importlib.import_module(name)
        _ = work.data  # Loads them.
        with contextlib.suppress(OSError):
            # 5 sets the peak to what is resident now.
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _kilobytes("VmRSS")

    def megabytes(self) -> float:
        """Return the peak above what was resident at first."""
        return (_kilobytes("VmHWM") - self._before) * 1024 / 1e6


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) if found else 0


def steps_needed(batches: int, over: int) -> int:
    """Return the number of steps that need data."""
    return max(FIRST_STEPS, _settling(over) + batches + over)


def measure(
    trainer: Trainer,
    work: Workload,
    memory: Growth,
    batches: int,
    over: int,
    alone: bool,
) -> dict[str, Any]:
    """Train, and measure the first step, later ones, and what epochs add.

    Args:
        trainer: trains in this process.
        work: its part of the work.
        memory: the growth of memory since before the model was built.
        batches: the number of times to measure.
        over: the number of steps over which each time is averaged.
        alone: whether processes exchange nothing, and so are not in lockstep.

    Returns:
        Seconds until the end of the first step, with everything that is
        compiled for it; losses of the first steps; milliseconds of every timed
        step; the per-epoch overhead in seconds, if there are epochs; the growth
        of memory, at its peak, in megabytes; and a few weights, to check that
        ranks agree.
    """
    store = FileStore(work.folder)

    def leave(name: str) -> None:
        store.put(f"{name}.{work.rank}", True)

    def all_left(name: str) -> bool:
        return all(store.get(f"{name}.{r}") for r in range(work.size))

    first = trainer.train(FIRST_STEPS, 1)
    leave("warm")
    while not all_left("warm"):
        time.sleep(_POLL_S)
    settling = _settling(over)
    times = trainer.train(settling + batches + over, 1)
    step_ms = [1e3 * s for s in differences(times.batches[settling:], over)]
    cost_s = None
    if times.epochs:
        short = trainer.train(_SHORT_EPOCH_STEPS, _SHORT_EPOCHS)
        epoch_s = differences(short.epochs)[_SKIPPED_EPOCHS:]
        steps_ms = _SHORT_EPOCH_STEPS * statistics.median(step_ms)
        cost_s = statistics.median(epoch_s) - steps_ms / 1e3
    megabytes, witness = memory.megabytes(), last_weights(trainer.model)
    leave("done")
    while alone and not all_left("done"):
        # If a rank stopped early, the others would run on a less busy machine.
        trainer.train(_SHORT_EPOCH_STEPS, 1)
    return {
        "first_step_s": first.first_step_s,
        "losses": first.losses,
        "step_ms": step_ms,
        "epoch_cost_s": cost_s,
        "memory_mb": megabytes,
        "choice": trainer.choice,
        "witness": witness,
    }


def _settling(over: int) -> int:
    """Return the number of untimed steps at the start of the timed run."""
    return max(_SETTLING_STEPS, over)


def differences(times: Sequence[float], over: int = 1) -> list[float]:
    """Return seconds per step, averaged over ``over`` steps from each time."""
    pairs = zip(times, times[over:], strict=False)
    return [(end - start) / over for start, end in pairs]


def last_weights(model: Any) -> list[float]:
    """Return weights of a Keras model's last layer: a bias, or a part of it."""
    import numpy as np

    # On any backend, of any shape and dtype.
    last = np.asarray(model.trainable_variables[-1].numpy(), np.float64)
    return last.ravel()[:_WITNESSES].tolist()
