"""Towers that update shared weights without waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence

from keras_towers import devices as devices_lib
from keras_towers.fit.asynchronous.calls import AsyncCalls
from keras_towers.fit.asynchronous.staleness import Staleness
from keras_towers.fit.asynchronous.update import UpdateAlone
from keras_towers.strategies import modes
from keras_towers.strategies.base import BaseStrategy, Rooms


class AsyncTowerStrategy(BaseStrategy):
    """Trains an existing Keras model on towers that wait for nobody.

    The model's weights and the state of its optimizer exist once. Every tower
    takes the next whole batch, computes gradients on the weights as they are
    just then, and applies them at once, whatever others have applied
    meanwhile. So a slow tower never blocks a fast one, and the weights depend
    on the order of events: they are not those of one device.

    ``fit`` is otherwise as ever. Every batch is one step and one update, none
    is lost, and ``optimizer.iterations`` counts them. Metrics are exact sums
    over what the towers have counted. Callbacks of a batch are called when it
    is handed out, up to twice as many batches ahead as there are towers, with
    logs that are up to a tenth of a second old (those of the epoch before,
    until a step of this one has ended). Those of the epoch's end and of
    everything behind it see all steps done, and so do those of its last batch,
    where the data tells how many there are. An error on a tower is raised by
    ``fit``.

    ``train_on_batch`` trains as one device, and one tower alone is plain
    training. ``evaluate``, ``predict`` and custom training loops run on all
    towers together, as in ``TowerStrategy``. Where an update depends on the
    number of updates before it, or reads what it writes (gradient accumulation,
    moving averages, loss scaling, constraints), the towers update one after the
    other. Of ``run_eagerly`` models the towers take turns.

    It ports tensorpack's ``AsyncMultiGPUTrainer``; the algorithm is
    Hogwild! (Recht, Re, Wright and Niu, "Hogwild!: A Lock-Free Approach to
    Parallelizing Stochastic Gradient Descent", 2011).

    Args:
        towers: number of devices, a list of GPU ids, a list of device names,
            or None for all visible GPUs, else all logical CPUs.
        scale_gradient: divide every tower's gradients by the number of towers.
            With SGD as many batches as there are towers then move the weights
            as far as one synchronous step does; optimizers that follow only the
            direction of gradients, such as Adam, do not see it.

    Attributes:
        staleness: a ``Staleness`` with ``mean``, ``max`` and ``histogram``: how
            many updates of others a step of the last epoch has missed. It is
            also written to TensorBoard, where that is a callback.

    Raises:
        TowerError: devices that do not exist.

    Example:
        >>> with keras_towers.AsyncTowerStrategy(4) as strategy:
        ...     model.fit(x, y, epochs=5)
        >>> print(strategy.staleness)
        mean 2.91, max 7 over 94 steps
    """

    calls: AsyncCalls
    update: UpdateAlone

    def __init__(
        self,
        towers: int | Sequence[int | str] | None = None,
        scale_gradient: bool = True,
    ):
        devices = devices_lib.resolve(towers)
        self.scale_gradient = bool(scale_gradient)
        scale = 1 / len(devices) if scale_gradient else 1.0
        reduce = modes.choose(devices, None).reduce

        def update(rooms: Rooms) -> UpdateAlone:
            return UpdateAlone(
                scale, rooms.config, rooms.spread, rooms.order, reduce
            )

        super().__init__(devices, update, reduce, AsyncCalls, batches="each")

    @property
    def mode(self) -> str:
        """How the towers work together: ``"async"``."""
        return "async"

    @property
    def staleness(self) -> Staleness:
        """How many updates of others a step of the last epoch has missed."""
        return self.calls.staleness

    def _described(self) -> list[str]:
        scaled = "not scaled"
        if self.scale_gradient:
            scaled = f"scaled by 1/{self.num_towers}"
        return [
            f'mode "async": {self.update.description}',
            f"gradients are {scaled}",
            "every tower takes the next whole batch as soon as it is free",
        ]
