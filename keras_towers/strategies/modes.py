"""Which reduction a strategy runs, and why."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from keras_towers import reduction
from keras_towers.errors import TowerError

logger = logging.getLogger("keras_towers")

MODES = ("nccl", "collective", "hierarchical", "gpu", "cpu")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A reduction that can run here.

    Attributes:
        name: one of ``MODES``.
        reason: one sentence: why this mode.
        reduce: from K lists of N gradients and K devices to K lists of N sums.
    """

    name: str
    reason: str
    reduce: Callable


def choose(devices: Sequence[str], wanted: str | None) -> Mode:
    """Pick the reduction for some devices.

    With no wish: ``cpu`` where all towers are on the host, which then sums
    where the weights are updated; on GPUs ``hierarchical`` for eight (as on a
    DGX-1) and ``nccl`` for other numbers, as tensorpack's replicated trainer
    does, and ``gpu`` where NCCL cannot run.

    Args:
        devices: the towers.
        wanted: one of ``MODES``, or None.

    Returns:
        The mode; where the wanted one cannot run, another one, logged.

    Raises:
        TowerError: unknown mode.
    """
    if wanted is not None and wanted not in MODES:
        raise TowerError(
            f"mode={wanted!r} is not known. Give one of "
            f"{', '.join(map(repr, MODES))}, or None to let the strategy pick."
        )
    on_host = all("CPU" in device.upper() for device in devices)
    if wanted is None:
        name, reason = _default(devices, on_host)
        return _make(name, reason, devices, on_host)
    obstacle = _obstacle(wanted, devices)
    if obstacle is None:
        return _make(wanted, "asked for", devices, on_host)
    name = "cpu" if on_host else "gpu"
    reason = f"{wanted!r} was asked for, but {obstacle}"
    logger.warning("mode %r instead: %s", name, reason)
    return _make(name, reason, devices, on_host)


def _default(devices: Sequence[str], on_host: bool) -> tuple[str, str]:
    if len(devices) == 1:
        return "cpu" if on_host else "gpu", "one tower: nothing to reduce"
    if on_host:
        return "cpu", "all towers are on the host, so sums cost no copy there"
    if len(devices) == 8:
        return "hierarchical", "eight GPUs: two groups of four, as on a DGX-1"
    obstacle = _obstacle("nccl", devices)
    if obstacle is None:
        return "nccl", "several physical GPUs"
    return "gpu", f"NCCL cannot run: {obstacle}"


def _obstacle(name: str, devices: Sequence[str]) -> str | None:
    """Why a mode cannot run on these devices, or None."""
    if name == "nccl":
        available, reason = reduction.nccl_available(devices)
        return None if available else reason
    if name == "hierarchical" and len(devices) % 2:
        return (
            f"it needs an even number of towers, in two equal groups; there "
            f"are {len(devices)}"
        )
    return None


def _make(
    name: str, reason: str, devices: Sequence[str], on_host: bool
) -> Mode:
    if name == "collective":
        available, _ = reduction.nccl_available(devices)
        hint = "nccl" if available else "ring"
        reason = f"{reason}; {hint} algorithm"
        return Mode(name, reason, reduction.CollectiveAllReduce(devices, hint))
    reductions = {
        "nccl": reduction.nccl_all_reduce,
        "hierarchical": reduction.hierarchical_all_reduce,
        "gpu": reduction.sum_on_towers,
        "cpu": reduction.sum_on_host,
    }
    return Mode(name, reason, reductions[name])
