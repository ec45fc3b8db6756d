"""A ``fit`` of one worker, which resumes after its last batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.calls import callback_roles
from keras_towers.fit.components import TowerFunction
from keras_towers.fit.context import patches
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.data.data_use import DataUse
from keras_towers.fit.step.graph.step_layout import StepSettings
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Logs, Structure, Variable
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.parameter_servers.averaged_updates import AveragedSession
from keras_towers.parameter_servers.training_session import Session
from keras_towers.parameter_servers.workers import FitEnded
from keras_towers.replicas.hogwild import ATOMIC_ADDITIONS, draws_of
from keras_towers.replicas.replica_calls import (
    DroppedGradients,
    ReplicaCall,
    TrainFunction,
)

# The session whose fit runs in this thread.
current_session: ThreadLocal[Session] = ThreadLocal()


class WorkerFit(ReplicaCall):
    """A ``fit`` of one worker.

    1. ``_on_train_begin``. The chief uploads all variables. The other workers
       download them, and start at the chief's epoch. A worker that was
       restarted skips the batches that it had trained on.
    2. ``train``. A step pushes this worker's gradients to the servers, and the
       worker reads the next weights: at once if workers are asynchronous, else
       when they have been updated. If the chief has stopped the training, all
       workers stop, after the same step unless they are asynchronous.
    3. ``_on_epoch_end``. If all workers end an epoch together, they wait for
       the chief's callbacks, and stop if these stop the training. Otherwise
       ``_on_epoch_begin`` follows, with the weights that these have left.
    4. ``_leave``. This worker pushes no more gradients. The chief waits until
       all workers have left, makes the last update, and has the result.
    5. ``_finish``. The chief publishes that the model is final. The other
       workers wait for that and download it.

    If ``fit`` fails on the chief, it fails on all workers.
    """

    # The fit begins with an exchange of all weights.
    makes_first = True
    refusal = (
        "parameter servers hold the weights of this model, so its train "
        "function runs only inside fit(): call fit()."
    )

    def __init__(self, session: Session, *args: Any):
        super().__init__(*args)
        self.session = session
        self._workers = session.workers
        self._is_chief = session.rank == 0
        if self._is_chief and isinstance(session, AveragedSession):
            self.dropped = DroppedGradients(
                session.quorum, lambda: session.counts
            )
        self._has_left = False
        # Whether no step follows, whatever callbacks say.
        self._is_over = False
        # Batches to skip: this worker had trained on them before it died.
        self._skipped = 0
        self._epoch_before: int | None = None
        # On the chief, optimizers use the servers' variables for a whole fit.
        self._optimizers = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        arguments = self.keras_call.arguments
        self._refuse_swaps(callback_roles.listed(arguments.get("callbacks")))
        # Called after all other callbacks.
        joins = keras.callbacks.LambdaCallback(
            on_train_begin=self._on_train_begin,
            on_epoch_begin=self._on_epoch_begin,
            on_train_batch_end=self._on_batch_end,
            on_epoch_end=self._on_epoch_end,
        )
        arguments["callbacks"] = callback_roles.with_added(
            arguments.get("callbacks"), joins
        )
        # Leaves before the optimizer writes the final values of the weights.
        optimizer = self.model.optimizer
        methods: patches.Shadows = {}
        if optimizer is not None:
            methods = {"finalize_variable_values": self._finalize}
        with (
            patches.patched_while_used(_SHARED_VARIABLES),
            self._ended(),
            current_session.holding(self.session),
            patches.overridden([optimizer], lambda _: methods),
            super().installed(),
        ):
            yield

    def _make_step_function(self, kind: str, force: bool = False) -> None:
        if kind != "train":
            return super()._make_step_function(kind, force)
        if isinstance(self.model.train_function, TrainFunction) and not force:
            return
        self.session.begin_trace()
        self.model.train_function = None
        super()._make_step_function("train", force)
        function: TowerFunction = getattr(self.model, "train_function")  # noqa: B009
        self.model.train_function = TrainFunction(self, function)

    def _refuse_swaps(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """Refuse a swap of weights that other workers may update meanwhile."""
        swaps = keras.callbacks.SwapEMAWeights
        if not self.session.needs_all and any(
            isinstance(getattr(callback, "callback", callback), swaps)
            for callback in callbacks
        ):
            raise TowerError(
                "SwapEMAWeights would exchange the weights on the parameter "
                "servers while other workers update them, and these updates "
                "would be lost: let every update average one gradient of each "
                "worker (replicas_to_aggregate=None), or leave out this "
                "callback."
            )

    @property
    def settings(self) -> StepSettings:
        return dataclasses.replace(
            super().settings, around=self.session.trace_step
        )

    def _data_use(self, kind: str) -> DataUse:
        use = super()._data_use(kind)
        if kind != "fit":
            return use
        return dataclasses.replace(use, on_next_step=self._workers.beat)

    def prepare(self) -> None:
        if self._prepared:
            return
        super().prepare()
        # Workers draw random numbers for the whole batch, and use their rows.
        seeds = self.config.options.batches == "split"
        self.session.variables.create_copies(self.model, seeds)
        optimizers = state_lib.collect(self.model).optimizers
        self.session.check_optimizers(optimizers)

    def _on_train_begin(self, logs: Logs = None) -> None:
        """Start at the chief's epoch, after all callbacks have begun."""
        session, model = self.session, self.model
        arguments = self.keras_call.arguments
        session.trains = True
        session.connection.finished = False
        session.fits += 1
        self._epoch_before = model._initial_epoch
        epoch = self._epoch_before or arguments.get("initial_epoch") or 0
        # Until then, a late worker may still write in an earlier fit.
        rank_checks.gather(session.peers, None, f"begins fit {session.fits}")
        session.begin_fit()
        where = f"takes over the weights of fit {session.fits}"
        epoch = rank_checks.gather(session.peers, epoch, where)[0]
        is_back = self._workers.publish_begun()
        if self._is_chief:
            self._optimizers.enter_context(
                session.variables.optimizers_on_servers()
            )
        else:
            session.variables.download()
        if is_back:
            self._come_back()
        if self._workers.steps_done:
            # Batches are read, and skipped, to keep the order of the data.
            assert self.epoch_iterator is not None
            epochs, self._skipped = self.epoch_iterator.skip_batches(
                self._workers.steps_done
            )
            epoch += epochs
            self._workers.publish(epoch=epoch - 1, epoch_steps=None)
        try:
            if not self._has_left:
                has_weights, _ = session.read_weights()
                self._has_left = not has_weights
        except FitEnded:
            self._has_left = True
        # Keras begins with this epoch; with none if the fit has ended.
        if self._has_left:
            epoch = arguments.get("epochs", 1)
        model._initial_epoch = epoch

    def _come_back(self) -> None:
        """Find the last step that this worker made before it died."""
        workers, session = self._workers, self.session
        with contextlib.suppress(FitEnded):
            if workers.status(0).steps is None:
                if not workers.own.left:
                    workers.steps_done = session.come_back()
                    if workers.steps_done:
                        session.restore_seeds(workers.steps_done)
                    return
                # The worker may have died before it left the updates.
                session.leave()
                workers.wait_for_chief()
        self._has_left = True
        workers.steps_done = workers.status(0).steps or 0

    def train(self, steps: Any, iterator: Iterator[Structure]) -> Logs:
        logs = None
        for _ in range(self.model.steps_per_execution):
            if self._skipped:
                next(iterator)
                self._skipped -= 1
                continue
            self.session.prefetch_weights()
            try:
                with (
                    patches.shadowed(self.model, {"steps_per_execution": 1}),
                    self.session.variables.optimizers_on_servers(),
                ):
                    logs = steps(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
            if not self._end_step():
                self._is_over = self.model.stop_training = True
                break
        return logs

    def _end_step(self) -> bool:
        """Read the new weights; return whether another step follows."""
        self._workers.beat()
        self._workers.steps_done += 1
        self.session.after_step()
        try:
            has_weights, stopped = self.session.read_weights()
        except FitEnded:
            self._has_left = True
            return False
        if not has_weights:
            self._workers.check_failed()
        return has_weights and stopped < self.session.fits

    def _on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin with the weights that the chief's callbacks have left."""
        if not self.session.epochs_together:
            return
        if not self._is_chief:
            self._workers.wait_for_chief(begun=epoch)
            self.session.variables.download(self.session.variables.trained)
        self._workers.publish(epoch_begun=epoch)
        if self._is_chief:
            # The chief's next callback may write, too.
            self._workers.wait_until_begun(epoch)

    def _on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Go on if only a callback of this worker stops, after all of them."""
        # No other worker would train on this one's rows of the next batches.
        if not self._is_chief and self.session.splits_batches:
            self.model.stop_training = self._is_over

    def _on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Stop if the chief stops, after all callbacks."""
        session = self.session
        self._on_batch_end(0)
        stops = bool(self.model.stop_training)
        together = session.epochs_together and not stops
        if self._is_chief and stops:
            session.stop(session.fits)
        if self._is_chief or together:
            steps = self._workers.steps_done if together else None
            self._workers.publish(epoch=epoch, epoch_steps=steps)
        if together and not self._is_chief:
            self._workers.wait_for_chief(ended=epoch)
            self._workers.check_same_data()
            self.model.stop_training = session.last_stopped() >= session.fits

    def _finalize(
        self,
        optimizer: keras.Optimizer,
        original: patches.Original,
        variables: Sequence[Variable],
    ) -> None:
        begun = self.session.trains
        if begun:
            self._leave(stops=bool(self.model.stop_training))
        original(variables)
        if begun:
            self.session.upload(self.session.variables.trained)

    def _leave(self, stops: bool = False) -> None:
        """Leave the steps; on the chief, wait for all workers to do so."""
        if self._has_left:
            return
        self._has_left = True
        session = self.session
        if stops and self._is_chief:
            session.stop(session.fits)
        self._workers.publish(left=True)
        with contextlib.suppress(FitEnded):
            session.leave(stops and self._is_chief)
        if self._is_chief:
            self._workers.wait_for_others(session.is_over)
            # Stops workers that are late.
            session.stop(session.fits)
            session.finish()
            session.upload(session.variables.others)
            self._optimizers.close()
            session.variables.download()

    def finish_steps(self, logs: Logs) -> Logs:
        self.session.upload(self.session.variables.others)
        return logs

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """End the training after this block, whether it succeeds or fails."""
        session = self.session
        try:
            yield
            if session.trains:
                self._finish()
        except BaseException:
            if session.trains:
                session.connection.finished = False
            raise
        finally:
            if session.trains:
                session.trains = False
                self.model._initial_epoch = self._epoch_before
                self._optimizers.close()
                session.clean_up()

    def _finish(self) -> None:
        self._leave()
        if self._is_chief:
            self._workers.publish(steps=self._workers.steps_done)
        else:
            self._workers.wait_for_chief()
        self.session.variables.download()
        self.session.connection.finished = True


def _assign(
    original: patches.Original, variable: Variable, value: object
) -> object:
    """Assign a value; on the chief, callbacks also write to the servers."""
    result = original(variable, value)
    session = current_session.get()
    if session is not None and tf.executing_eagerly():
        session.upload([variable])
    return result


def _worker_with_own_data() -> tf.Variable | None:
    session = current_session.get()
    return None if session is None or session.splits_batches else session.number


# Patches for drawing random numbers and writing shared variables.
_SHARED_VARIABLES: tuple[patches.Patch, ...] = (
    *ATOMIC_ADDITIONS,
    (compat.KerasVariable, "assign", _assign),
    draws_of(_worker_with_own_data),
)
