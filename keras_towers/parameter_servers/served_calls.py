"""Calls of Keras's methods on workers of parameter servers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import KerasCall, Start, TowerConfig, UpdateCall
from keras_towers.fit.update.weight_update import UpdateAtVariable, WeightUpdate
from keras_towers.parameter_servers.connection import ServerPeers
from keras_towers.parameter_servers.served_fit import ServedFit, current_session
from keras_towers.parameter_servers.session import Session, WorkerUpdates
from keras_towers.parameter_servers.workers import Workers
from keras_towers.reduction import Gradients
from keras_towers.replicas.replica_call import OneFitPerModel, refuse_eager


class _ServerUpdate:
    """Passes the sums of a worker's gradients to the session that trains."""

    config: Any
    _sums: Callable[..., list[list[Any]]]

    def _update(self, call: UpdateCall, tower_grads: Gradients) -> None:
        session = current_session.get()
        if session is None:
            raise TowerError(
                f"{self.config.name} trains by fit() only: it keeps workers "
                "in step from the beginning of a fit to its end. For "
                "train_on_batch and custom loops use HorovodStrategy or "
                "MultiWorkerTowerStrategy."
            )
        sums = self._sums(call, tower_grads)[0]
        sums = session.variables.send(call.variables, sums)
        session.updates.push(dataclasses.replace(call, grads=sums))


class MirroredServerUpdate(_ServerUpdate, WeightUpdate):
    """Every tower has a copy of each weight, read from the servers."""

    name = "servers"
    description = (
        "weights are updated on the parameter servers and copied to each tower"
    )


class CachedServerUpdate(_ServerUpdate, UpdateAtVariable):
    """The towers of a worker share one copy of each weight."""

    name = "servers"
    description = (
        "weights are updated on the parameter servers and copied to each worker"
    )


class ServedCalls(OneFitPerModel):
    """Trains together with the other workers; evaluates alone.

    Attributes:
        last: the session of the ``fit`` that began or ended last.
    """

    def __init__(
        self,
        update: MirroredServerUpdate | CachedServerUpdate,
        peers: ServerPeers,
        make_updates: Callable[[Session], WorkerUpdates],
    ):
        super().__init__(update)
        # Runs evaluation and prediction, without other workers.
        self._alone_step = self._step.alone()
        self._peers = peers
        self._make_updates = make_updates
        self._sessions: IdentityDict[keras.Model, Session] = IdentityDict()
        self._numbers = itertools.count(1)
        self._fits = itertools.count(1)
        self.last: Session | None = None

    def _session_of(self, model: keras.Model) -> Session:
        """Return the session in which the workers train a model."""
        if model not in self._sessions:
            self._sessions[model] = Session(
                self._peers,
                next(self._numbers),
                self._config.batches == "split",
                self._make_updates,
            )
        return self._sessions[model]

    def _fit(self, keras_call: KerasCall) -> Any:
        """Run a ``fit``; if it fails, publish the error to other workers."""
        session = self._session_of(keras_call.model)
        spare = session.updates.spare
        session.workers = Workers(self._peers, next(self._fits), spare)
        try:
            with (
                # Callbacks read from the servers, too.
                self._peers.connection.naming_lost_servers(),
                self._peers.polling(session.workers.poller(needs_all=True)),
            ):
                return super()._fit(keras_call)
        except BaseException as error:
            session.workers.fail(error)
            raise
        finally:
            self.last = session

    def _config_of(self, kind: str) -> TowerConfig:
        return self._config if kind == "fit" else self._config.alone()

    @property
    def alone(self) -> bool:
        return False

    def open(
        self, keras_call: KerasCall, prepared: bool, start: Start | None
    ) -> TowerCall:
        if keras_call.kind != "fit":
            return TowerCall(
                self._alone_step, self.adoption, keras_call, prepared, start
            )
        refuse_eager(self._config, keras_call.model)
        self.last = session = self._session_of(keras_call.model)
        return ServedFit(
            session, self._step, self.adoption, keras_call, prepared, start
        )
