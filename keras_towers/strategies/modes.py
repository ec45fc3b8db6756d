"""Which reduction a strategy runs, and why."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from keras_towers import devices as devices_lib
from keras_towers import reduction
from keras_towers.errors import TowerError

logger = logging.getLogger("keras_towers")

ModeName: TypeAlias = Literal[
    "nccl", "collective", "hierarchical", "gpu", "cpu"
]


def _always(devices: Sequence[str]) -> str | None:
    return None


def _nccl(devices: Sequence[str]) -> str | None:
    available, reason = reduction.nccl_available(devices)
    return None if available else reason


def _two_groups(devices: Sequence[str]) -> str | None:
    if len(devices) % 2 == 0:
        return None
    return (
        "it needs an even number of towers, in two equal groups; there are "
        f"{len(devices)}"
    )


class Entry(NamedTuple):
    """A mode that a user can ask for.

    Attributes:
        make: from the devices to the reduction.
        obstacle: from the devices to why it cannot run there, or None.
        note: from the reduction to what is to be said of it.
    """

    make: Callable[[Sequence[str]], reduction.Reduction]
    obstacle: Callable[[Sequence[str]], str | None] = _always
    note: Callable[[Any], str] = lambda reduce: ""


MODES: dict[ModeName, Entry] = {
    "nccl": Entry(lambda devices: reduction.nccl_all_reduce, _nccl),
    "collective": Entry(
        lambda devices: reduction.CollectiveAllReduce(devices),
        note=lambda reduce: f"; {reduce.hint} algorithm",
    ),
    "hierarchical": Entry(
        lambda devices: reduction.hierarchical_all_reduce, _two_groups
    ),
    "gpu": Entry(lambda devices: reduction.sum_on_towers),
    "cpu": Entry(lambda devices: reduction.sum_on_host),
}
"""Every mode by its name; the type above names them for type checkers."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """A reduction that can run here.

    Attributes:
        name: one of ``MODES``.
        reason: one sentence: why this mode.
        reduce: from K lists of N gradients and K devices to K lists of N sums.
    """

    name: ModeName
    reason: str
    reduce: reduction.Reduction


def choose(
    devices: Sequence[str],
    wanted: ModeName | None,
    packer: reduction.GradientPacker | bool | None = None,
) -> Mode:
    """Pick the reduction for some devices.

    With no wish: ``cpu`` where all towers are on the host, which then sums
    where the weights are updated; on GPUs ``hierarchical`` for eight (as on a
    DGX-1) and ``nccl`` for other numbers, as tensorpack's replicated trainer
    does, and ``gpu`` where NCCL cannot run.

    Args:
        devices: the towers.
        wanted: one of ``MODES``, or None.
        packer: packs gradients for the reduction. True: one with its defaults;
            False: none; None: one on accelerators, where few large transfers
            beat many small ones. On the host the copies into and out of packs
            cost more than they save.

    Returns:
        The mode; where the wanted one cannot run, another one, logged.

    Raises:
        TowerError: unknown mode.
    """
    if wanted is not None and wanted not in tuple(MODES):
        raise TowerError(
            f"mode={wanted!r} is not known. Give one of "
            f"{', '.join(map(repr, MODES))}, or None to let the strategy pick."
        )
    on_host = devices_lib.all_on_host(devices)
    if wanted is None:
        name, reason = _default(devices, on_host)
    else:
        name, reason = wanted, "asked for"
        obstacle = MODES[wanted].obstacle(devices)
        if obstacle is not None:
            name = "cpu" if on_host else "gpu"
            reason = f"{wanted!r} was asked for, but {obstacle}"
            logger.warning("mode %r instead: %s", name, reason)
    reduce = MODES[name].make(devices)
    reason += MODES[name].note(reduce)
    if packer is None:
        packer = not on_host
    if packer and len(devices) > 1:
        if packer is True:
            packer = reduction.GradientPacker()
        reduce = reduction.packed(reduce, packer)
        reason = f"{reason}; gradients are packed"
    return Mode(name, reason, reduce)


def _default(devices: Sequence[str], on_host: bool) -> tuple[ModeName, str]:
    if len(devices) == 1:
        return "cpu" if on_host else "gpu", "one tower: nothing to reduce"
    if on_host:
        return "cpu", "all towers are on the host, so sums cost no copy there"
    if len(devices) == 8:
        return "hierarchical", "eight GPUs: two groups of four, as on a DGX-1"
    obstacle = _nccl(devices)
    if obstacle is None:
        return "nccl", "several physical GPUs"
    return "gpu", f"NCCL cannot run: {obstacle}"
