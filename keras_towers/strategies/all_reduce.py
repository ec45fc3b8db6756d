"""Synchronous towers: who updates the weights, with which sum of gradients."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from keras_towers import devices as devices_lib
from keras_towers import reduction as reduction_lib
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.update.reduce import UpdateEach, UpdateOnce
from keras_towers.strategies.modes import Mode
from keras_towers.strategies.options import Options

logger: logging.Logger = logging.getLogger("keras_towers")


def update_of(config: TowerConfig, options: Options, mode: Mode) -> UpdateOnce:
    """Create the update of towers that all-reduce their gradients."""
    reduction = mode.reduce
    over_ranks: Callable[[Any], Any] = list
    transport, updates = config.transport, options.updates
    if transport.size > 1:
        from keras_towers.strategies.ranks import hook_of

        hook = hook_of(options.compression, transport, config.devices)
        reduction = reduction_lib.across_ranks(reduction, transport, hook)
        over_ranks = functools.partial(
            reduction_lib.sum_over_ranks, transport, hook=hook
        )
    if updates == "sharded" and config.num_replicas == 1:
        logger.warning(
            'updates="sharded" is off: there is one tower, with no others '
            "to share the update with"
        )
        updates = None
    if updates == "sharded":
        from keras_towers.fit.update.sharded import UpdateSharded

        # An all-reduce that was asked for takes more transfers, but is used.
        requested = options.mode or options.packer
        return UpdateSharded(
            config, over_ranks, reduction if requested else None
        )
    if updates is None:
        on_host = devices_lib.all_on_host(config.devices)
        updates = "once" if on_host else "each"
    kind = UpdateOnce if updates == "once" else UpdateEach
    return kind(config, reduction)


def described(config: TowerConfig, update: Any, mode: Mode) -> list[str]:
    """Describe where gradients are summed, and where an update's state is."""
    line = f'mode "{mode.name}": {mode.reason}'
    if update.name != "sharded":
        return [line]
    if update.sums_at_weights:
        line = "gradients are summed on the tower that updates their weight"
    held = [
        f"{bytes_:,} bytes on {tower_lib.short_name(device)}"
        for device, bytes_ in zip(
            config.devices, update.slot_bytes, strict=False
        )
    ]
    return [line, *[f"optimizer state: {', '.join(held)}"] * bool(held)]
