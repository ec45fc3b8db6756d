"""Towers that update shared weights without waiting for each other."""

from __future__ import annotations

from keras_towers import devices as devices_lib
from keras_towers.fit.options import Options
from keras_towers.replicas.async_calls import AsyncCalls
from keras_towers.replicas.hogwild import HogwildUpdate
from keras_towers.replicas.tower_threads import Staleness
from keras_towers.strategies.base import BaseStrategy


class AsyncTowerStrategy(BaseStrategy):
    """Trains an existing Keras model on towers without synchronizing them.

    There is one copy of the model's weights, of its metrics and of its
    optimizer's state. Each tower takes the next whole batch, computes gradients
    with the current weights, and applies them immediately, even if other towers
    have updated the weights in the meantime. So a slow tower never blocks a
    fast one, but the weights depend on timing: they differ from those on one
    device, and runs are not bit-reproducible.

    Otherwise ``fit`` behaves as usual. Each batch is one step and one update,
    no update is lost, and ``optimizer.iterations`` counts them. Additions to a
    variable are not lost either, so metrics are exact. Batch callbacks run when
    a batch is handed to a tower, up to two batches per tower ahead of its step,
    with the logs of the step that ended last (of the previous epoch until a
    step of this one has ended). Epoch-end callbacks run after all steps of the
    epoch; so do the callbacks of its last batch if the length of the data is
    known. ``fit`` raises errors that occur on a tower.

    A single tower is plain training. ``train_on_batch``, ``evaluate``,
    ``predict`` and custom training loops run as with ``TowerStrategy``, and
    eager steps run as on one device. If an update depends on the number of
    earlier updates, or reads what it writes (gradient accumulation, moving
    averages, loss scaling, constraints), the towers update one at a time.

    Ports tensorpack's ``AsyncMultiGPUTrainer``; the algorithm is
    Hogwild! (Recht, Re, Wright and Niu, "Hogwild!: A Lock-Free Approach to
    Parallelizing Stochastic Gradient Descent", 2011).

    Args:
        towers: as for ``TowerStrategy``.
        scale_gradient: divide the gradients of each asynchronous step by the
            number of towers.

    Attributes:
        staleness: a ``Staleness`` with ``mean``, ``max`` and ``histogram``: how
            many updates of other towers the asynchronous steps of the last
            epoch missed. It is also written to TensorBoard if that callback is
            used.

    Raises:
        TowerError: devices that do not exist.

    Example:
        >>> with keras_towers.AsyncTowerStrategy(4) as strategy:
        ...     model.fit(x, y, epochs=5)
        >>> print(strategy.staleness)
        mean 2.91, max 7 over 94 steps
    """

    _mode_name = "async"

    def __init__(
        self,
        towers: devices_lib.Towers | None = None,
        *,
        scale_gradient: bool = True,
    ):
        devices = devices_lib.devices_of(towers)
        given = Options(batches="each", scale_gradient=scale_gradient)
        super().__init__(devices, given)
        self.scale_gradient = scale_gradient
        scale = 1 / len(devices) if scale_gradient else 1.0
        update = HogwildUpdate(self._config, self._mode.reduce, scale)
        self._calls: AsyncCalls
        self._compose(update, AsyncCalls(update))

    @property
    def staleness(self) -> Staleness:
        """How many updates by other towers the last epoch's steps missed."""
        return self._calls.staleness

    def _description_lines(self) -> list[str]:
        scaled = "not scaled"
        if self.scale_gradient:
            scaled = f"scaled by 1/{self.num_towers}"
        return [
            f'mode "async": {self._update.description}',
            "every tower takes the next whole batch as soon as it is free, and "
            f"gradients are {scaled}",
            "train_on_batch runs as with TowerStrategy, eager steps as on one "
            "device",
        ]
