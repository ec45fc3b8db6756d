"""A strategy under which ``fit`` runs its callbacks and no step."""

from __future__ import annotations

from collections.abc import Mapping

from keras_towers import devices as devices_lib
from keras_towers.errors import TowerError
from keras_towers.fit.calls.noop import NoOpCalls
from keras_towers.fit.contract import Update
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.strategies import modes
from keras_towers.strategies.base import BaseStrategy, Rooms


class NoOpStrategy(BaseStrategy):
    """Runs the epochs, steps and callbacks of ``fit``, and computes nothing.

    To try out callbacks, schedules and scripts without waiting for a model.
    Weights, also moving averages, stay as they are; callbacks may change what
    they like. No data is needed (``fit(steps_per_epoch=100)``), and none is
    read but to find the end of data that does not tell its number of batches.
    A model that is not built gets the weights that its data call for; where
    data does not tell its shapes (a ``PyDataset``), two batches are read.

    Validation inside ``fit`` does nothing either, and calls its callbacks. What
    a callback, or anyone else, asks for by ``evaluate`` or ``predict`` is
    computed as ever, on one device. In a custom loop the strategy is one tower.

    It ports tensorpack's ``NoOpTrainer``.

    Args:
        logs: what every step reports, for callbacks that need a number;
            validation reports it too, as ``val_...``. None: nothing was
            computed, so there is nothing to report.

    Attributes:
        logs: what every step reports.

    Raises:
        TowerError: ``logs`` that are no dictionary; in ``fit``, neither data
            nor a number of steps, empty data, or a negative number of steps or
            batch size.

    Example:
        >>> with keras_towers.NoOpStrategy():
        ...     model.fit(epochs=3, steps_per_epoch=100, callbacks=[mine])
    """

    def __init__(self, logs: Mapping[str, float] | None = None):
        if logs is not None and not isinstance(logs, Mapping):
            raise TowerError(
                f"logs={logs!r} is not allowed: give a dictionary such as "
                '{"loss": 0.5}, or None.'
            )
        self.logs = dict(logs or {})
        devices = devices_lib.resolve(None)[:1]
        reduce = modes.choose(devices, None).reduce

        def update(rooms: Rooms) -> Update:
            return UpdateOnce(rooms.config, rooms.spread, rooms.order, reduce)

        super().__init__(
            devices,
            update,
            reduce,
            lambda step, adoption: NoOpCalls(self, adoption, self.logs),
        )

    def describe(self) -> str:
        """Say that nothing is computed.

        Example:
            >>> print(NoOpStrategy().describe())
            NoOpStrategy: epochs, steps and callbacks run; nothing is computed
        """
        return (
            "NoOpStrategy: epochs, steps and callbacks run; nothing is computed"
        )
