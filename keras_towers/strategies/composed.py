"""A strategy composed of parts that other packages write."""

from __future__ import annotations

from typing import Unpack

from keras_towers.fit.options import RankKeywords, StrategyOptions, options_of
from keras_towers.fit.update.sharding_policy import OnDevices
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.least_loaded import Placement
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.incomplete_classes import check_complete, name_of
from keras_towers.strategies import modes
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.device_mesh import ClaimedDevices
from keras_towers.transport import (
    SingleProcess,
    Transport,
    devices as devices_lib,
)


class ComposedStrategy(BaseStrategy):
    """A strategy of parts that you choose or write: use it, or inherit from it.

    Args:
        towers: as for ``TowerStrategy``. None: one device with ``transport``,
            else all devices.
        transport: connects this process to the others. None: this process
            trains alone.
        placement: a function that chooses the device of a trained weight; None:
            as ``updates`` and ``weights`` say.
        **options: the options of ``HorovodStrategy``, among them ``mode``, a
            reduction, and ``compression``, a communication hook;
            ``StrategyOptions`` describes them in detail.

    Raises:
        TowerError: a part is not complete, or contradicts an option.

    Example:
        >>> from keras_towers.extending import ComposedStrategy
        >>> class OnTheLast(ComposedStrategy):
        ...     def __init__(self, towers=None, **options):
        ...         super().__init__(towers, placement=last_device, **options)
    """

    def __init__(
        self,
        towers: devices_lib.Towers | None = None,
        *,
        transport: Transport | None = None,
        placement: Placement | None = None,
        **options: Unpack[RankKeywords],
    ):
        checked = options_of(self, RankKeywords, options)
        if transport is not None:
            check_complete(
                transport,
                Transport,
                "Inherit from keras_towers.extending.EngineTransport.",
            )
        if placement is not None:
            _check_placement(placement, checked)
        if towers is None and transport is None and checked.layouts is None:
            towers = devices_lib.devices_of(None)
        place = transport or SingleProcess()
        claimed = ClaimedDevices(place, towers or 1, checked.layouts)
        super().__init__(claimed.towers(), checked, transport=transport)
        update = None
        if placement is not None:
            self._mode_name = "placement"
            sums = modes.sums_over_ranks(self._config)
            sharding = OnDevices(self._config, placement)
            update = WeightUpdate(self._config, sharding, **sums)
        self._placement = placement
        self._compose(update)

    def _description_lines(self) -> list[str]:
        lines = super()._description_lines()
        if self._placement is None:
            return lines
        name = name_of(self._placement)
        return [f"{name} places trained weights", *lines[1:]]


def _check_placement(placement: Placement, options: StrategyOptions) -> None:
    """Refuse what is no placement, and options that it contradicts."""
    if not callable(placement):
        raise TowerError(
            f"placement={placement!r} is not allowed: give a function that "
            "gets a weight and returns the name of a device."
        )
    for name in ("weights", "updates", "layouts", "mode", "packer"):
        if (value := getattr(options, name)) is not None:
            raise TowerError(
                f"placement contradicts {name}={value!r}: the device "
                "of a weight sums its gradients and updates it. Leave one of "
                "them out."
            )
