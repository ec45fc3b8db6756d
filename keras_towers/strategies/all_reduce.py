"""What strategies have in common that all-reduce gradients over towers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, get_args

from keras_towers import devices as devices_lib
from keras_towers import reduction as reduction_lib
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig, Updates
from keras_towers.fit.update.reduce import UpdateEach, UpdateOnce
from keras_towers.fit.update.sharded import UpdateSharded
from keras_towers.strategies import modes
from keras_towers.strategies.base import BaseStrategy, one_of
from keras_towers.transport import SingleProcess, Transport

logger: logging.Logger = logging.getLogger("keras_towers")


class AllReduceStrategy(BaseStrategy):
    """Every tower has a replica; gradients are summed over all of them.

    Args:
        towers: as for ``TowerStrategy``.
        mode: as for ``TowerStrategy``.
        updates: as for ``TowerStrategy``.
        packer: as for ``TowerStrategy``.
        transport: connects the processes; None: there is one.
        exchange: how gradients travel between them.
        **options: for ``BaseStrategy``.

    Raises:
        TowerError: devices, modes or other arguments that do not exist.
    """

    def __init__(
        self,
        towers: devices_lib.Towers | None,
        mode: modes.ModeName | None = None,
        updates: Updates | None = None,
        packer: reduction_lib.GradientPacker | bool | None = None,
        transport: Transport | None = None,
        exchange: reduction_lib.Exchange = reduction_lib.exact,
        **options: Any,
    ):
        one_of("updates", updates, (*get_args(Updates), None))
        transport = transport or SingleProcess()
        devices = devices_lib.resolve(towers)
        self._mode = modes.choose(devices, mode, packer)
        reduction = all_reduce = self._mode.reduce
        over_ranks: Callable[[Any], Any] = list
        if transport.size > 1:
            # Only gradients may be compressed.
            over_ranks = functools.partial(
                reduction_lib.sum_over_ranks, transport, exchange=exchange
            )
            across = reduction_lib.across_ranks
            reduction = across(self._mode.reduce, transport, exchange)
            all_reduce = across(self._mode.reduce, transport)
        if updates == "sharded" and len(devices) * transport.size == 1:
            logger.warning(
                'updates="sharded" is off: there is one tower, with no others '
                "to share the update with"
            )
            updates = None
        if updates is None:
            on_host = devices_lib.all_on_host(devices)
            updates = "once" if on_host else "each"
        # An all-reduce that was asked for takes more transfers, but is used.
        requested = reduction if mode or packer else None

        def update(config: TowerConfig) -> UpdateOnce:
            if updates == "sharded":
                return UpdateSharded(config, over_ranks, requested)
            kind = UpdateOnce if updates == "once" else UpdateEach
            return kind(config, reduction)

        super().__init__(
            devices, update, all_reduce, transport=transport, **options
        )

    @property
    def mode(self) -> modes.ModeName:
        """The mode that runs."""
        return self._mode.name

    def _described(self) -> list[str]:
        mode = f'mode "{self.mode}": {self._mode.reason}'
        update = self._components.update
        if not isinstance(update, UpdateSharded):
            return [mode, *super()._described()]
        if update.sums_at_weights:
            mode = "gradients are summed on the tower that updates their weight"
        held = [
            f"{bytes_:,} bytes on {tower_lib.short_name(device)}"
            for device, bytes_ in zip(
                self._config.devices, update.slot_bytes, strict=False
            )
        ]
        state = f"optimizer state: {', '.join(held)}"
        return [mode, *super()._described(), *[state] * bool(held)]
