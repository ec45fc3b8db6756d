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


def run(wanted: Sequence[str], timeout_s: float = 180) -> list[Finding]:
    """Train alone and as jobs, and compare the losses."""
    setting = Setting("cpu", batch=16, steps=1, timeout_s=timeout_s)
    alone = Sample(Cell(_MODEL, "plain", 1, 0))
    findings = []
    with tempfile.TemporaryDirectory(prefix="keras-towers-") as folder:
        stored = Path(folder, "model")
        try:
            store(_MODEL, stored, setting)
            alone = run_cell(ROWS["plain"], alone.cell, setting, stored)
        except TowerError as error:
            alone.error = str(error)
        if alone.error:
            return [_finding("one process", "failed", alone.error)]
        for over in wanted:
            start, row = time.monotonic(), OVER[over]
            cell = Cell(_MODEL, row, _RANKS, 0)
            sample = run_cell(ROWS[row], cell, setting, stored)
            text, failure = compare(alone, sample)
            text += f" ({time.monotonic() - start:.0f} s, on the CPU)"
            findings.append(_finding(f"over {over}", text, failure))
    return findings


def _finding(name: str, text: str, error: str) -> Finding:
    advice = f"The self-test {name} failed: {error}" if error else ""
    state = Status.BAD if error else Status.OK
    return Finding("Self-test", name, text, state, advice)


def compare(alone: Sample, job: Sample) -> tuple[str, str]:
    """Compare a job's losses with those of one process.

    Returns:
        What was found, and why that is an error; empty: it is none.
    """
    if job.error:
        return f"a job of {_RANKS} processes failed", job.error
    losses = alone.result["losses"], job.result["losses"]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    text = f"largest difference of a loss to one process {difference:.1e}"
    # Written so that NaN fails.
    passed = difference <= _TOLERANCE
    return text, "" if passed else "its losses are not those of one process"
