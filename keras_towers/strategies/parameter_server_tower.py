"""Towers of one process that share one copy of each weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, Unpack

from keras_towers import devices as devices_lib
from keras_towers.fit.options import (
    StepKeywords,
    Where,
    check_arguments,
    options_of,
)
from keras_towers.fit.update.weight_update import UpdateAtVariable
from keras_towers.fit.weights.placement import LeastLoadedPlacement
from keras_towers.strategies.base import BaseStrategy


def choose_places(
    devices: Sequence[str], where: Where | None
) -> tuple[Where, list[str]]:
    """Choose the devices that hold weights: the towers, or their host."""
    if where is None:
        where = "gpu" if len(devices) <= 2 else "cpu"
    places = devices if where == "gpu" else [devices_lib.host_of(devices[0])]
    return where, [devices_lib.short_name(place) for place in places]


class ParameterServerTowerStrategy(BaseStrategy):
    """Trains on several devices that share one copy of every weight.

    Each tower reads the weights from the devices that hold them and computes
    gradients on its share of the batch. Each gradient is summed on the device
    of its variable and applied there once. The weights are as exact as with
    ``TowerStrategy``, but need the memory of only one copy.

    Only trained weights and the optimizer's slots are placed in this way. All
    other variables (moving statistics, metrics, random states, frozen weights)
    stay where they are. In a custom loop in ``strategy.scope()`` each tower has
    a replica, as with ``TowerStrategy``.

    A ``tf.Variable`` obtained from the model before the block may be out of
    date inside it, because the weight is on another device; after the block it
    is up to date again. Keras variables and ``model.get_weights()`` are always
    up to date.

    Ports tensorpack's ``SyncMultiGPUTrainerParameterServer``.

    Args:
        towers: as for ``TowerStrategy``.
        ps_device: ``"cpu"``: all weights are on the host. ``"gpu"``: they are
            spread over the towers, each going to the tower that holds the
            fewest bytes. None: ``"gpu"`` for one or two towers, else ``"cpu"``.
        average: True: gradients are the same as on one device. False: they are
            multiplied by the number of replicas, as in tensorpack.
        batches: ``"split"``: the towers share every batch. ``"each"``: every
            tower draws a whole one.
        sync_every_epoch: synchronize all variables at the end of each epoch.
        batch_norm: ``"global"``: BatchNormalization has the statistics of the
            global batch. ``"tower"``: only of each tower's rows.
        micro_batches: into how many parts each tower divides its rows, to save
            memory; ``"auto"``: as few as memory allows.
        **options: described in more detail by ``Options``.

    Attributes:
        ps_device: where the weights are: ``"cpu"`` or ``"gpu"``.
        placement: which device holds which weight.

    Raises:
        TowerError: unknown devices or invalid arguments.

    Example:
        >>> with keras_towers.ParameterServerTowerStrategy(4):
        ...     model.fit(x, y, epochs=5)
    """

    _mode_name = "parameter-server"

    def __init__(
        self,
        towers: devices_lib.Towers | None = None,
        *,
        ps_device: Where | None = None,
        **options: Unpack[StepKeywords],
    ):
        check_arguments(ParameterServerTowerStrategy, ps_device=ps_device)
        checked = options_of(self, StepKeywords, options)
        devices = devices_lib.devices_of(towers)
        where, places = choose_places(devices, ps_device)
        self.ps_device: Where = where
        self.placement: LeastLoadedPlacement = LeastLoadedPlacement(places)
        super().__init__(devices, checked)
        self._compose(UpdateAtVariable(self._config, self.placement))

    def __enter__(self) -> Self:
        super().__enter__()
        self.placement.clear()
        return self

    def _description_lines(self) -> list[str]:
        where = {
            "cpu": "on the host",
            "gpu": "spread over the towers",
        }[self.ps_device]
        held = f"trained weights are {where}"
        table = self.placement.describe().replace("\n", "\n      ")
        if table:
            held += f":\n      {table}"
        return [held, *super()._description_lines()[1:]]
