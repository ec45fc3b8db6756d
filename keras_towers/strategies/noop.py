"""A strategy under which ``fit`` runs callbacks but no steps."""

from __future__ import annotations

from collections.abc import Mapping

from keras_towers import devices as devices_lib
from keras_towers._notices import announce
from keras_towers.errors import TowerError
from keras_towers.fit.calls.noop_calls import NoOpCalls
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.strategies.base import BaseStrategy


class NoOpStrategy(BaseStrategy):
    """Runs the epochs, steps and callbacks of ``fit`` without computing.

    For testing callbacks, schedules and scripts without waiting for a model.
    Weights and moving averages do not change, except by callbacks. No data is
    needed (``fit(steps_per_epoch=100)``), and data is read only to find its end
    if its length is unknown; from a ``PyDataset``, which does not declare its
    shapes, Keras reads a batch or two. An unbuilt model is built from its data.

    Validation inside ``fit`` also computes nothing and runs its callbacks.
    Explicit calls of ``evaluate`` and ``predict``, for example from a callback,
    compute as usual, on one device. In a custom loop the strategy is one tower.

    Ports tensorpack's ``NoOpTrainer``.

    Args:
        logs: the logs of every step, for callbacks that need a number;
            validation reports them too, as ``val_...``. None: empty logs.

    Attributes:
        logs: the logs of every step.

    Raises:
        TowerError: ``logs`` is not a dictionary; in ``fit``: neither data nor a
            number of steps is given, the data is empty, or the number of steps
            or the batch size is negative.

    Example:
        >>> with keras_towers.NoOpStrategy():
        ...     model.fit(epochs=3, steps_per_epoch=100, callbacks=[mine])
    """

    _mode_name = "noop"

    def __init__(self, *, logs: Mapping[str, float] | None = None):
        if logs is not None and not isinstance(logs, Mapping):
            raise TowerError(
                f"logs={logs!r} is not allowed: give a dictionary such as "
                '{"loss": 0.5}, or None.'
            )
        self.logs: dict[str, float] = dict(logs or {})
        super().__init__(devices_lib.resolve(None)[:1])
        update = WeightUpdate(self._config, self._mode.reduce)
        self._compose(update, NoOpCalls(update, self.logs))

    def _announce(self) -> None:
        announce(repr(self))

    def __repr__(self) -> str:
        return (
            "NoOpStrategy: epochs, steps and callbacks run; nothing is computed"
        )

    def _description_lines(self) -> list[str]:
        return []
