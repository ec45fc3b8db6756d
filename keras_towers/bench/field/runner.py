"""Runs the cells of the field, each in fresh processes with a time limit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from keras_towers.bench.field.plan import FieldCell
from keras_towers.bench.field.rows import Runs
from keras_towers.bench.plan import Setting
from keras_towers.bench.runner import (
    ONE_CORE,
    Sample,
    WorkerFailed,
    mean,
    run_workers,
    same_weights,
    sampled,
)
from keras_towers.errors import TowerError

_WORKER = "keras_towers.bench.field.worker"


FieldSample: TypeAlias = Sample[FieldCell]
"""The outcome of one cell: its measurements, or an error."""


def store(source: str, stored: Path, setting: Setting) -> dict[str, Any]:
    """Store the initial weights and the data of a model.

    Args:
        source: a key of ``models.MODELS``, or the user's ``module:function``.
        stored: the folder to store them in.
        setting: what all cells have in common.

    Returns:
        The number of parameters, and a note for the reader of the table.

    Raises:
        TowerError: the user's function does not return what it has to, or the
            process failed.
    """
    try:
        (result,) = _run(source, None, stored, setting)
    except WorkerFailed as error:
        raise TowerError(f"cannot build {source}: {error}") from None
    if "refused" in result:
        raise TowerError(result["refused"])
    return result


def run_field_cell(
    cell: FieldCell, stored: Mapping[str, Path], setting: Setting
) -> FieldSample:
    """Measure one cell in separate processes."""
    stored_in = stored[cell.model]
    return sampled(
        cell,
        lambda: combine(cell, _run(cell.model, cell, stored_in, setting)),
    )


def combine(cell: FieldCell, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the measurements of the processes of a cell.

    Raises:
        WorkerFailed: the processes trained different models.
    """
    if cell.field_row.listed:
        same_weights(ranks)
    means = ("first_step_s", "epoch_cost_s")
    return {
        "step_ms": [ms for rank in ranks for ms in rank["step_ms"]],
        **{name: mean([rank[name] for rank in ranks]) for name in means},
        # One process holds all replicas.
        "memory_mb": sum(rank["memory_mb"] for rank in ranks),
        # Shares of a global batch are equal.
        "losses": [
            statistics.fmean(losses)
            for losses in zip(*(r["first_losses"] for r in ranks), strict=True)
        ],
        "frozen_losses": ranks[0].get("frozen_losses"),
        "how": ranks[0]["choice"],
    }


def environment(cell: FieldCell, device: str) -> dict[str, str]:
    """Return the variables that a cell's processes are started with."""
    row = cell.field_row
    variables = {"KERAS_BACKEND": row.backend}
    if device == "gpu":
        return variables
    variables |= {**ONE_CORE, "JAX_PLATFORMS": "cpu"}
    if row.backend == "jax":
        devices = cell.replicas if row.runs is Runs.DEVICES else 1
        variables["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={devices} "
            "--xla_cpu_multi_thread_eigen=false"
        )
    return variables


def _run(
    source: str, cell: FieldCell | None, stored: Path, setting: Setting
) -> list[dict[str, Any]]:
    task = {
        "cell": asdict(cell) if cell else None,
        "setting": asdict(setting),
        "model": source,
        "stored": str(stored),
    }
    processes, launcher = 1, []
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    if cell:
        processes = cell.processes
        number = "-np" if cell.field_row.horovod else "--workers"
        launcher = [number, str(processes)]
        variables = environment(cell, setting.device)
    return run_workers(
        _WORKER, task, processes, launcher, setting.timeout_s, variables
    )
