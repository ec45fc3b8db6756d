"""Calls of Keras's methods in workers that share parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.callbacks import Start
from keras_towers.errors import TowerError
from keras_towers.fit.asynchronous.update import add_atomically
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.calls import callbacks as callbacks_lib
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.calls.synchronous import TowerCalls
from keras_towers.fit.context import patches
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.context.slots import Slot
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.data.iterator import TowerEpochIterator
from keras_towers.fit.served.session import Session
from keras_towers.fit.served.update import CachedOnce, CopiesOnTowers
from keras_towers.fit.step.global_batch import GlobalStep
from keras_towers.fit.weights.adoption import Adoption


class ServedCalls(TowerCalls):
    """Trains together with other workers; evaluates by itself.

    Args:
        step: runs a step of training.
        alone: runs a step of any other kind, without the other workers.
        adoption: the models placed on the towers.
        session: returns how the workers train the n-th model together.
    """

    def __init__(
        self,
        step: GlobalStep,
        alone: GlobalStep,
        adoption: Adoption,
        session: Callable[[int], Session],
    ):
        super().__init__(step, adoption)
        self._by_itself = alone
        self._make_session = session
        self._sessions: ByIdentity[keras.Model, Session] = ByIdentity()
        self._made = 0
        self.last: Session | None = None

    def session_of(self, model: keras.Model) -> Session:
        """Return how the workers train a model together."""
        if model not in self._sessions:
            self._made += 1
            self._sessions[model] = self._make_session(self._made)
        self.last = self._sessions[model]
        return self.last

    def _config_of(self, kind: str) -> TowerConfig:
        return self._config if kind == "fit" else self._config.alone()

    @property
    def _alone(self) -> bool:
        return False

    @property
    def update(self) -> CopiesOnTowers | CachedOnce:
        """What updates the weights."""
        update = self._step.update
        assert isinstance(update, (CopiesOnTowers, CachedOnce))
        return update

    def open(
        self,
        model: keras.Model,
        kind: str,
        prepared: bool,
        start: Start | None,
    ) -> TowerCall:
        """Create the call object that Keras's loop uses."""
        if kind != "fit":
            given = self._by_itself, self._adoption, model
            return TowerCall(*given, kind, prepared, start)
        if model.run_eagerly:
            raise TowerError(
                f"{self._config.name} needs compiled steps, but model "
                f"{model.name!r} is set to run_eagerly=True: compile it "
                "without, or debug it outside of the strategy."
            )
        given = self._step, self._adoption, model
        return _ServedFit(self, *given, kind, prepared, start)

    def _run(
        self,
        call: TowerCall,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not isinstance(call, _ServedFit):
            return super()._run(call, original, args, kwargs)
        given = callbacks_lib.by_name(original, args, kwargs)
        given["callbacks"] = callbacks_lib.with_added(
            given.get("callbacks"), _InStep(call)
        )
        add_atomically()
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
        return result


class _ServedFit(TowerCall):
    """A ``fit`` of one worker."""

    def __init__(self, calls: ServedCalls, *args: Any):
        super().__init__(*args)
        self.session = calls.session_of(self.model)
        self._begun = False
        self._alone = self.config.alone()

    def shadows(self) -> dict[str, Any]:
        return {
            **super().shadows(),
            "make_train_function": self._make_train_function,
        }

    def _make_train_function(self, force: bool = False) -> None:
        if isinstance(self.model.train_function, _TrainFunction) and not force:
            return
        self.model.train_function = None
        self.session.retrace()
        self._make("train", force)
        function: Any = getattr(self.model, "train_function")  # noqa: B009
        self.model.train_function = _TrainFunction(function)
        self.adoption.remember_function(self.model, "train_function")

    def _iterator(self, kind: str, **kwargs: Any) -> TowerEpochIterator:
        # Each worker validates on all of the data.
        if kind == "fit":
            return super()._iterator(kind, **kwargs)
        return TowerEpochIterator(self._alone, kind, None, **kwargs)

    def prepare(self, batch: Any) -> None:
        super().prepare(batch)
        self.session.hold(self.model)

    def begin(self) -> None:
        """Begin to train, when all callbacks have begun."""
        left = self.session.begin(self.model)
        self._begun = True
        if left:
            self.session.first()

    def train(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Train on the next ``steps_per_execution`` batches."""
        logs = None
        for _ in range(self.model.steps_per_execution):
            try:
                with (
                    patches.shadowed(self.model, {"steps_per_execution": 1}),
                    self.session.in_place(),
                ):
                    logs = function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
            except tf.errors.OpError as error:
                with self.session.connection.naming_lost_servers():
                    raise error
            if not self.session.stepped():
                self.model.stop_training = True
                break
        return logs

    @contextlib.contextmanager
    def noticing_the_end(self) -> Iterator[None]:
        """Leave before the optimizer gives the weights their final values."""
        optimizer = self.model.optimizer
        with contextlib.ExitStack() as stack:
            if optimizer is not None:
                mine = patches.bound(
                    optimizer, {"finalize_variable_values": self._finalize}
                )
                stack.enter_context(patches.shadowed(optimizer, mine))
            yield

    def _finalize(
        self, optimizer: Any, original: Callable[[Any], None], variables: Any
    ) -> None:
        if self._begun:
            self.session.leave(bool(self.model.stop_training))
        original(variables)
        if self._begun:
            self.session.finalized()

    @contextlib.contextmanager
    def writing_through(self) -> Iterator[None]:
        """Let what the chief's callbacks assign reach the servers, too."""
        if self.session.rank > 0:
            yield
            return
        with _writes_to.filled(self.session):
            patches.replace(compat.KerasVariable, "assign", _assign)
            yield

    def end_of_steps(self, logs: Any) -> Any:
        self.session.end_steps()
        return logs

    def end(self, error: BaseException | None) -> None:
        """End the training, as a whole or by an error."""
        if self._begun:
            self.session.end(error)


_writes_to: Slot[Session] = Slot()


def _assign(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    result = original(variable, value)
    session = _writes_to.get()
    if session is not None and tf.executing_eagerly():
        session.write_through(variable)
    return result


class _TrainFunction:
    """The model's train function: each of its steps is one of this worker."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function

    def __call__(self, iterator: Any) -> Any:
        call = call_lib.current()
        if not isinstance(call, _ServedFit):
            raise TowerError(
                "the train function of a model whose weights parameter servers "
                "hold runs inside fit() only: call that."
            )
        return call.train(self._function, iterator)


class _InStep(keras.callbacks.Callback):
    """Joins the other workers behind what all other callbacks have done."""

    def __init__(self, call: _ServedFit):
        super().__init__()
        self._call = call

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over where the chief begins."""
        self._call.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note how far it has come."""
        self._call.session.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop where the chief stops."""
        model = self._call.model
        stops = self._call.session.end_epoch(epoch, bool(model.stop_training))
        model.stop_training = stops
