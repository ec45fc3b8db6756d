"""Calls and updates of workers that share parameter servers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.calls import callback_roles
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.calls.synchronous import TowerCalls
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import KerasCall, Start, TowerConfig, UpdateCall
from keras_towers.fit.data.iterator import TowerEpochIterator
from keras_towers.fit.update.weight_update import UpdateAtVariable, WeightUpdate
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.parameter_servers.averaged_updates import AveragedUpdates
from keras_towers.parameter_servers.connection import ServerPeers
from keras_towers.parameter_servers.session import (
    Session,
    WorkerUpdates,
    current_session,
)
from keras_towers.parameter_servers.workers import Workers
from keras_towers.reduction import Gradients
from keras_towers.replicas.asynchronous.hogwild import (
    ATOMIC_ADDITIONS,
    seed_of_replica,
)
from keras_towers.replicas.replica_call import (
    DroppedGradients,
    ReplicaCall,
    TrainFunction,
    refuse_eager,
)


class _ToServers:
    """Hands the sums of a worker's towers to the session that trains."""

    config: Any
    _sums: Callable[..., list[list[Any]]]

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        session = current_session.get()
        if session is None:
            raise TowerError(
                f"{self.config.name} trains by fit() only: it keeps workers "
                "in step from the beginning of a fit to its end. For "
                "train_on_batch and custom loops use HorovodStrategy or "
                "MultiWorkerTowerStrategy."
            )
        sums = self._sums(call, rows)[0]
        sums = session.variables.send(call.variables, sums)
        session.updates.take(dataclasses.replace(call, grads=sums))


class CopiesOnTowers(_ToServers, WeightUpdate):
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


class ServedCalls(TowerCalls):
    """Trains together with the other workers; evaluates alone.

    Attributes:
        last: the session of the ``fit`` that began or ended last.
    """

    def __init__(
        self,
        update: CopiesOnTowers | CachedOnce,
        peers: ServerPeers,
        make_updates: Callable[[Session], WorkerUpdates],
    ):
        super().__init__(update)
        # Steps of any other kind than training.
        self._by_itself = self._step.alone()
        self._peers = peers
        self._make_updates = make_updates
        self._sessions: IdentityDict[keras.Model, Session] = IdentityDict()
        self._numbers = itertools.count(1)
        self._fits = 0
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

    def run(self, keras_call: KerasCall) -> Any:
        """Run one call; tell the other workers if a ``fit`` fails."""
        if keras_call.kind != "fit":
            return super().run(keras_call)
        session = self._session_of(keras_call.model)
        if session.trains:
            raise TowerError(
                f"fit of model {keras_call.model.name!r} is called inside its "
                f"own fit, which {self._config.name} cannot do: call fit of "
                "another model there, or fit again afterwards."
            )
        self._fits += 1
        workers = Workers(self._peers, self._fits, session.updates.spare)
        session.workers = workers
        try:
            with (
                # Callbacks read what the servers hold, too.
                self._peers.connection.naming_lost_servers(),
                self._peers.polling(workers.poller(needs_all=True)),
            ):
                return super().run(keras_call)
        except BaseException as error:
            workers.fail(error)
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
                self._by_itself, self.adoption, keras_call, prepared, start
            )
        refuse_eager(self._config, keras_call.model)
        self.last = session = self._session_of(keras_call.model)
        call = ServedFit(
            session, self._step, self.adoption, keras_call, prepared, start
        )
        updates = session.updates
        if isinstance(updates, AveragedUpdates) and session.rank == 0:
            call.dropped = DroppedGradients(
                updates.quorum, lambda: updates.counts
            )
        return call


class ServedFit(ReplicaCall):
    """A ``fit`` of one worker."""

    refusal = (
        "the train function of a model whose weights parameter servers hold "
        "runs inside fit() only: call that."
    )

    def __init__(self, session: Session, *args: Any):
        super().__init__(*args)
        self.session = session
        self._begun = False
        self._before: int | None = None
        self._left_out = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        arguments = self.keras_call.arguments
        # Behind what all other callbacks have done.
        joins = keras.callbacks.LambdaCallback(
            on_train_begin=self.begin, on_epoch_end=self.end_epoch
        )
        arguments["callbacks"] = callback_roles.with_added(
            arguments.get("callbacks"), joins
        )
        # The session ends before the optimizer gives the weights their final
        # values.
        optimizer = self.model.optimizer
        methods: dict[str, Any] = {}
        if optimizer is not None:
            methods = {"finalize_variable_values": self._finalize}
        with (
            patches.held(_SHARED_VARIABLES),
            self._ended(),
            current_session.filled(self.session),
            patches.shadowed(optimizer, patches.bound(optimizer, methods)),
            super().opened(),
        ):
            yield

    def _make(self, kind: str, force: bool = False) -> None:
        if kind != "train":
            return super()._make(kind, force)
        if isinstance(self.model.train_function, TrainFunction) and not force:
            return
        self.model.train_function = None
        self.session.updates.begin_trace()
        super()._make("train", force)
        function: Any = getattr(self.model, "train_function")  # noqa: B009
        self.model.train_function = TrainFunction(self, function)

    def run_step(self, step: Callable[[Any], Any], batch: Any) -> Any:
        with self.session.updates.trace_step():
            result = super().run_step(step, batch)
        variables = self.session.variables
        variables.refuse_writes(compat.get_default_graph())
        return result

    def _iterator(self, kind: str, **kwargs: Any) -> TowerEpochIterator:
        if kind != "fit":
            # Each worker validates on all of the data.
            return TowerEpochIterator(self.config.alone(), kind, **kwargs)
        beat = self.session.workers.beat
        return super()._iterator(kind, between=beat, **kwargs)

    def prepare(self, batch: Any) -> None:
        super().prepare(batch)
        # Of the numbers of a whole batch each takes those of its own rows.
        seeds = self.config.batches == "split"
        self.session.variables.hold(self.model, seeds)
        optimizers = state_lib.collect(self.model).optimizers
        self.session.updates.check(optimizers)

    def begin(self, logs: Any = None) -> None:
        """Start at the chief's position, after all callbacks have begun."""
        session, model = self.session, self.model
        self._begun = True
        self._before = model._initial_epoch
        first = (
            self._before or self.keras_call.arguments.get("initial_epoch") or 0
        )
        epoch, behind = session.begin(first)
        if behind:
            # So that it reads what the others do, in the same order.
            epochs, self._left_out = self.epoch_iterator.pass_over(behind)
            epoch += epochs
            session.steps_done = behind
        if not session.has_left:
            session.start()
        # By this Keras begins where a checkpoint ended: with no epoch, if the
        # others have ended the last one.
        epochs = self.keras_call.arguments.get("epochs", 1)
        model._initial_epoch = epochs if session.has_left else epoch

    def train(self, steps: Any, iterator: Any) -> Any:
        logs = None
        for _ in range(self.model.steps_per_execution):
            if self._left_out:
                next(iterator)
                self._left_out -= 1
                continue
            self.session.ask()
            try:
                with (
                    patches.shadowed(self.model, {"steps_per_execution": 1}),
                    self.session.variables.in_place(),
                ):
                    logs = steps(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
            if not self.session.step():
                self.model.stop_training = True
                break
        return logs

    def end_epoch(self, epoch: int, logs: Any = None) -> None:
        """Stop where the chief stops, after all callbacks."""
        stops = bool(self.model.stop_training)
        self.model.stop_training = self.session.end_epoch(epoch, stops)

    def _finalize(
        self, optimizer: Any, original: Callable[[Any], None], variables: Any
    ) -> None:
        if self._begun:
            self.session.leave(bool(self.model.stop_training))
        original(variables)
        if self._begun:
            self.session.put(self.session.variables.trained)

    def end_of_steps(self, logs: Any) -> Any:
        self.session.put(self.session.variables.others)
        return logs

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """End the training after this block, whether it succeeds or fails."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            if self._begun:
                self.model._initial_epoch = self._before
                self.session.end(error)


def _assign(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Assign a value; those of the chief's callbacks also go to the servers."""
    result = original(variable, value)
    session = current_session.get()
    if session is not None and tf.executing_eagerly():
        session.put([variable])
    return result


def _next_seed(
    original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make workers with their own data draw their own random numbers."""
    seed = original(generator, *args, **kwargs)
    session = current_session.get()
    if session is None or session.splits_batches:
        return seed
    return seed_of_replica(seed, session.rank)


# How workers draw random numbers and write shared variables.
_SHARED_VARIABLES: tuple[patches.Patch, ...] = (
    *ATOMIC_ADDITIONS,
    (compat.KerasVariable, "assign", _assign),
    (keras.random.SeedGenerator, "next", _next_seed),
)
