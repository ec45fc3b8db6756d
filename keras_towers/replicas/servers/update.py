"""Updates of weights that parameter servers hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.fit.update.at_variable import UpdateAtVariable
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.reduction import Gradients


class TakesSums(Protocol):
    """Receives the gradients of a worker, summed over its towers."""

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        sums: Sequence[Any],
    ) -> None:
        """Take N gradients, as part of the step that is being traced.

        Args:
            optimizer: the optimizer that the step called.
            original: its own ``apply``.
            variables: the N variables.
            sums: their gradients; None for a missing one.
        """
        ...


class _ToServers:
    """What the updates below have in common."""

    config: Any
    taker: TakesSums | None = None
    _sums: Callable[..., list[list[Any]]]

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        if self.taker is None:
            raise TowerError(
                f"{self.config.name} trains by fit() only: it keeps workers "
                "in step from the beginning of a fit to its end. For "
                "train_on_batch and loops of your own use HorovodStrategy or "
                "MultiWorkerTowerStrategy."
            )
        sums = self._sums(call, rows)[0]
        self.taker.take(call.optimizer, call.original, call.variables, sums)


class CopiesOnTowers(_ToServers, UpdateOnce):
    """Every tower has a copy of each weight; servers update theirs."""

    name = "servers"
    description = (
        "weights are updated on the parameter servers and copied to each tower"
    )


class CachedOnce(_ToServers, UpdateAtVariable):
    """The towers of a worker share one copy of each weight."""

    name = "servers"
    description = (
        "weights are updated on the parameter servers and copied to each worker"
    )
