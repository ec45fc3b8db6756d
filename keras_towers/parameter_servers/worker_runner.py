"""Runs calls on workers of parameter servers, and passes on gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import keras

from keras_towers.fit.calls.tower_call import TowerCall
from keras_towers.fit.components import (
    ApplyCall,
    FitStart,
    KerasCall,
    TowerConfig,
)
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.places import Places
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure, Variable
from keras_towers.parameter_servers.averaged_updates import AveragedSession
from keras_towers.parameter_servers.server_connection import ServerPeers
from keras_towers.parameter_servers.training_session import Session
from keras_towers.parameter_servers.worker_fit import WorkerFit, current_session
from keras_towers.parameter_servers.workers import Workers
from keras_towers.reduction.gradients import Gradients
from keras_towers.replicas.replica_calls import (
    OneFitPerModel,
    RunsReplicas,
    refuse_eager,
)
from keras_towers.replicas.replica_counts import ReplicaCounts


class ServerUpdate(WeightUpdate):
    """Passes the sums of a worker's gradients to the session that trains.

    The weights are copied to each tower, or to devices of their own, once for
    all towers of a worker.
    """

    name = "servers"
    pushes = True

    def __init__(self, config: TowerConfig, **options: Any):
        super().__init__(config, **options)
        copies = "worker" if self.sharding.keeps_devices else "tower"
        self.description = (
            "weights are updated on the parameter servers and copied to each "
            f"{copies}"
        )

    def note_own_step(self, step: ComparedStep) -> None:
        """Note a step that workers compare."""
        session = current_session.get()
        if session is not None:
            session.compare(step)

    def push(self, call: ApplyCall) -> None:
        """Pass gradients on that are results of a step."""
        session = current_session.get()
        if session is None:
            self._refuse()
        sums = session.variables.send(call.variables, call.grads)
        session.push(dataclasses.replace(call, grads=sums))

    def reduce_and_apply(self, call: ApplyCall, tower_grads: Gradients) -> None:
        """Refuse a custom loop."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TowerError(
            f"{self.config.name} trains only with fit(), which keeps "
            "workers in step from its beginning to its end. For "
            "train_on_batch and custom loops use HorovodStrategy or "
            "MultiWorkerTowerStrategy."
        )


class WorkerRunner(OneFitPerModel, RunsReplicas):
    """Trains together with the other workers; evaluates alone.

    Attributes:
        last: the session of the ``fit`` that began or ended last.
    """

    def __init__(
        self,
        update: ServerUpdate,
        peers: ServerPeers,
        make_session: Callable[[ServerPeers, int, bool], Session],
    ):
        super().__init__(update)
        self._peers = peers
        self._make_session = make_session
        self._sessions: IdentityDict[keras.Model, Session] = IdentityDict()
        self._numbers = itertools.count(1)
        self._fits = itertools.count(1)
        self.last: Session | None = None

    @property
    def counts(self) -> ReplicaCounts:
        if self.last is None:
            return ReplicaCounts.none(self._peers.size)
        assert isinstance(self.last, AveragedSession)
        return self.last.counts

    def updated(self, variable: keras.Variable) -> Variable:
        copies = self.last and self.last.variables
        if copies and variable in copies:
            return copies.copy_of(variable)
        return super().updated(variable)

    def _session_of(self, model: keras.Model) -> Session:
        """Return the session in which the workers train a model."""
        if model not in self._sessions:
            self._sessions[model] = self._make_session(
                self._peers,
                next(self._numbers),
                self._config.options.batches == "split",
            )
        return self._sessions[model]

    def _fit(self, keras_call: KerasCall) -> Structure:
        """Run a ``fit``; if it fails, publish the error to other workers."""
        if self.last is not None:
            self.last.workers.go_on()
        session = self._session_of(keras_call.model)
        session.workers = Workers(self._peers, next(self._fits), session.spare)
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

    def places(self, kind: str) -> Places:
        # Each worker validates on the whole data.
        places = super().places(kind)
        return places if kind == "fit" else places.alone()

    @property
    def runs_plain_keras(self) -> bool:
        return False

    def make_call(
        self, keras_call: KerasCall, prepared: bool, start: FitStart | None
    ) -> TowerCall:
        if keras_call.kind != "fit":
            return super().make_call(keras_call, prepared, start)
        refuse_eager(self._config, keras_call.model)
        self.last = session = self._session_of(keras_call.model)
        return WorkerFit(session, self, keras_call, prepared, start)
