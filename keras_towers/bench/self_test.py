"""Two processes train a small model and must match a single process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from keras_towers.bench.rows import ROWS
from keras_towers.bench.runner import Cell, Sample, Setting, run_cell, store
from keras_towers.doctor.checks import Finding, Status
from keras_towers.errors import TowerError

# The strategies that connect the processes, by what carries their tensors.
OVER = {
    name: strategy
    for name, strategy in (
        ("TensorFlow", "multi-worker"),
        ("parameter servers", "sync-replicas"),
        ("Horovod", "horovod"),
    )
    if strategy in ROWS
}
_MODEL, _RANKS = "small", 2
# Room for the effect of summation order on float32 losses.
_TOLERANCE = 1e-5
_FAILED = "The self-test failed; the output of its processes is above."


def run(
    wanted: Sequence[str], timeout_s: float = 180
) -> list[tuple[Finding, str]]:
    """Train alone and as jobs; return findings, and outputs of failures."""
    setting = Setting("cpu", batch=16, steps=1, timeout_s=timeout_s)
    found = []
    alone = Sample(Cell(_MODEL, "plain", 1, 0))
    with tempfile.TemporaryDirectory(prefix="keras-towers-") as folder:
        stored = Path(folder, "model")
        try:
            store(_MODEL, stored, setting)
            alone = run_cell(ROWS["plain"], alone.cell, setting, stored)
        except TowerError as error:
            alone.error = str(error)
        if alone.error:
            said = "one process failed"
            return [(_finding("one process", said, False), alone.error)]
        for over in wanted:
            start, row = time.monotonic(), OVER[over]
            cell = Cell(_MODEL, row, _RANKS, 0)
            sample = run_cell(ROWS[row], cell, setting, stored)
            passed, text = compare(alone, sample)
            text += f" ({time.monotonic() - start:.0f} s, on the CPU)"
            found.append((_finding(f"over {over}", text, passed), sample.error))
    return found


def _finding(name: str, text: str, passed: bool) -> Finding:
    state = Status.OK if passed else Status.BAD
    return Finding("Self-test", name, text, state, "" if passed else _FAILED)


def compare(alone: Sample, job: Sample) -> tuple[bool, str]:
    """Return whether a job's losses are those of one process, and a line."""
    if job.error:
        return False, f"a job of {_RANKS} processes failed"
    losses = alone.result["losses"], job.result["losses"]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    text = f"largest difference of a loss to one process {difference:.1e}"
    # Written so that NaN fails.
    return difference <= _TOLERANCE, text
