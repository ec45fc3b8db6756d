"""Where a worker's sums of gradients go: to the session that trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.fit.update.reduce import UpdateAtVariable, UpdateOnce
from keras_towers.reduction import Gradients
from keras_towers.replicas.servers import session as session_lib


class _ToServers:
    """Hands the sums of a worker's towers to the session that trains."""

    config: Any
    _sums: Callable[..., list[list[Any]]]

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        session = session_lib.current.get()
        if session is None:
            raise TowerError(
                f"{self.config.name} trains by fit() only: it keeps workers "
                "in step from the beginning of a fit to its end. For "
                "train_on_batch and loops of your own use HorovodStrategy or "
                "MultiWorkerTowerStrategy."
            )
        sums = self._sums(call, rows)[0]
        sums = session.variables.send(call.variables, sums)
        session.take(dataclasses.replace(call, grads=sums))


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
