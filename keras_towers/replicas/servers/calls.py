"""Calls of Keras's methods in workers that share parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_towers._notices import announce
from keras_towers.errors import TowerError
from keras_towers.fit.callbacks import Start
from keras_towers.fit.calls import callbacks as callbacks_lib
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.calls.synchronous import TowerCalls
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.parameter_servers.peers import ServerPeers
from keras_towers.replicas.asynchronous.dropped import Dropped
from keras_towers.replicas.asynchronous.tensorboard import with_writer
from keras_towers.replicas.asynchronous.update import add_atomically
from keras_towers.replicas.servers.fit import InStep, ServedFit
from keras_towers.replicas.servers.session import Session
from keras_towers.replicas.servers.update import CachedOnce, CopiesOnTowers
from keras_towers.replicas.servers.workers import Workers


class ServedCalls(TowerCalls):
    """Trains together with other workers; evaluates by itself.

    Args:
        update: gives the gradients to the servers.
        session: returns how the workers train the n-th model together.
        workers: returns those of the n-th ``fit``.
        peers: by which they tell one another values.
        dropped: counts dropped gradients; None: none can be.

    Attributes:
        last: how the workers train the model that was trained last; None if
            there is none.
    """

    def __init__(
        self,
        update: CopiesOnTowers | CachedOnce,
        session: Callable[[int], Session],
        workers: Callable[[int], Workers],
        peers: ServerPeers,
        dropped: Dropped | None = None,
    ):
        super().__init__(update)
        self.update = update
        # Steps of any other kind than training.
        self._by_itself = self._step.alone()
        self._make_session = session
        self._sessions: ByIdentity[keras.Model, Session] = ByIdentity()
        self._made = 0
        self._make_workers = workers
        self._peers = peers
        self._fits = 0
        self._dropped = dropped
        self.last: Session | None = None

    def session_of(self, model: keras.Model) -> Session:
        """Return how the workers train a model together."""
        if model not in self._sessions:
            self._made += 1
            self._sessions[model] = self._make_session(self._made)
        return self._sessions[model]

    def run(
        self,
        kind: str,
        original: Callable[..., Any],
        model: keras.Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call; tell the other workers if it is a fit that fails."""
        if kind != "fit":
            return super().run(kind, original, model, args, kwargs)
        session = self.session_of(model)
        if session.trains:
            raise TowerError(
                f"fit of model {model.name!r} is called inside its own fit, "
                f"which {self._config.name} cannot do: call fit of another "
                "model there, or fit again afterwards."
            )
        self._fits += 1
        session.workers = workers = self._make_workers(self._fits)
        try:
            with self._peers.looking(workers.watching()):
                return super().run(kind, original, model, args, kwargs)
        except BaseException as error:
            workers.fail(error)
            raise
        finally:
            self.last = session

    def _config_of(self, kind: str) -> TowerConfig:
        return self._config if kind == "fit" else self._config.alone()

    @property
    def _alone(self) -> bool:
        return False

    def open(
        self,
        model: keras.Model,
        kind: str,
        prepared: bool,
        start: Start | None,
    ) -> TowerCall:
        """Create the call object that Keras's loop uses."""
        if kind != "fit":
            return TowerCall(
                self._by_itself, self.adoption, model, kind, prepared, start
            )
        if model.run_eagerly:
            raise TowerError(
                f"{self._config.name} needs compiled steps, but model "
                f"{model.name!r} is set to run_eagerly=True: compile it "
                "without, or debug it outside of the strategy."
            )
        given = self._step, self.adoption, model, kind, prepared, start
        return ServedFit(self.session_of(model), self._dropped, *given)

    def _run(
        self,
        call: TowerCall,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not isinstance(call, ServedFit):
            return super()._run(call, original, args, kwargs)
        given = callbacks_lib.by_name(original, args, kwargs)
        given["callbacks"] = callbacks_lib.with_added(
            given.get("callbacks"), InStep(call)
        )
        if self._dropped is not None and call.session.rank == 0:
            _, given = with_writer(original, (), given, self._dropped.write)
        call.initial_epoch = given.get("initial_epoch") or 0
        add_atomically()
        self.last = call.session
        taker, self.update.taker = self.update.taker, call.session
        try:
            with call.noticing_the_end(), call.writing_through():
                result = super()._run(call, original, (), given)
        except BaseException as error:
            call.end(error)
            raise
        else:
            call.end(None)
        finally:
            self.update.taker = taker
        counts = call.session.counts
        if counts is not None and any(counts.dropped):
            announce(f"{self._config.name}: {counts}")
        return result
