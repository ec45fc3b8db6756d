"""Towers of one machine that share one copy of each weight."""

from __future__ import annotations

from typing import Literal, Self

import keras

from keras_towers import devices as devices_lib
from keras_towers import reduction as reduction_lib
from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import Batches, Extent
from keras_towers.fit.update.at_variable import UpdateAtVariable
from keras_towers.placement import LeastLoadedPlacement
from keras_towers.strategies import modes
from keras_towers.strategies.base import BaseStrategy

_PS_DEVICES = ("cpu", "gpu")


class ParameterServerTowerStrategy(BaseStrategy):
    """Trains on several devices that share one copy of every weight.

    Each tower reads the weights from the devices that hold them and computes
    gradients on its share of the batch. Each gradient is summed on the device
    of its variable and applied there once. The weights are those of one device,
    as with ``TowerStrategy``, but need the memory of only one copy.

    That holds for the trained weights of a model and for the optimizer's slots.
    Variables that towers write individually (moving statistics, metrics, random
    states) are kept on each tower, and so are frozen weights, which a
    ``train_step`` may write. In a custom loop in ``strategy.scope()`` each
    tower has a replica, as with ``TowerStrategy``.

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
        average: as for ``TowerStrategy``.
        batches: as for ``TowerStrategy``.
        sync_every_epoch: as for ``TowerStrategy``.
        exact: as for ``TowerStrategy``.
        batch_norm: as for ``TowerStrategy``.
        random: as for ``TowerStrategy``.

    Attributes:
        ps_device: where the weights are: ``"cpu"`` or ``"gpu"``.
        placement: which device holds which weight.

    Raises:
        TowerError: unknown devices or invalid arguments.

    Example:
        >>> with keras_towers.ParameterServerTowerStrategy(4):
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self,
        towers: devices_lib.Towers | None = None,
        ps_device: Literal["cpu", "gpu"] | None = None,
        average: bool = True,
        batches: Batches = "split",
        sync_every_epoch: bool = True,
        exact: bool = False,
        batch_norm: Extent | None = None,
        random: Extent | None = None,
    ):
        if ps_device not in (*_PS_DEVICES, None):
            raise TowerError(
                f"ps_device={ps_device!r} is not allowed: give one of "
                f"{', '.join(map(repr, _PS_DEVICES))}, or None to choose by "
                "the number of towers."
            )
        devices = devices_lib.resolve(towers)
        if ps_device is None:
            ps_device = "gpu" if len(devices) <= 2 else "cpu"
        self.ps_device: Literal["cpu", "gpu"] = ps_device
        homes = devices
        if ps_device == "cpu":
            homes = [reduction_lib.host_of(devices[0])]
        self.placement: LeastLoadedPlacement = LeastLoadedPlacement(
            [tower_lib.short_name(device) for device in homes]
        )

        super().__init__(
            devices,
            lambda config: UpdateAtVariable(config, self._place),
            modes.choose(devices, None).reduce,
            average=average,
            batches=batches,
            sync_every_epoch=sync_every_epoch,
            exact=exact,
            batch_norm=batch_norm,
            random=random,
        )

    @property
    def mode(self) -> Literal["parameter-server"]:
        """How the towers work together: ``"parameter-server"``."""
        return "parameter-server"

    def _place(self, variable: keras.Variable) -> str:
        """Choose the device that will hold a weight."""
        return self.placement(variable.path, variable.shape, variable.dtype)

    def __enter__(self) -> Self:
        super().__enter__()
        self.placement.clear()
        return self

    def _described(self) -> list[str]:
        where = {
            "cpu": "on the host",
            "gpu": "spread over the towers",
        }[self.ps_device]
        held = f"trained weights are {where}"
        if self.placement.placed:
            table = self.placement.describe().replace("\n", "\n      ")
            held += f":\n      {table}"
        return [held, *super()._described()]
