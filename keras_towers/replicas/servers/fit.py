"""A ``fit`` of one of the workers that share parameter servers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.context import patches
from keras_towers.fit.context.blocks import Slot
from keras_towers.fit.data.iterator import TowerEpochIterator
from keras_towers.replicas.asynchronous.dropped import Dropped
from keras_towers.replicas.servers.session import Session


class ServedFit(TowerCall):
    """A ``fit`` of one worker.

    Args:
        session: how the workers train the model together.
        dropped: counts dropped gradients; None: none can be.
        *args: as for ``TowerCall``.

    Attributes:
        initial_epoch: the argument of ``fit``.
    """

    initial_epoch: int = 0

    def __init__(self, session: Session, dropped: Dropped | None, *args: Any):
        super().__init__(*args)
        self.session = session
        self._dropped = dropped
        self._begun = False
        self._before: int | None = None
        self._without_others = self.config.alone()
        self._left_out = 0

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
        beat = self.session.workers.beat
        if kind == "fit":
            return _Beating(beat, self.config, kind, self.order, **kwargs)
        # Each worker validates on all of the data.
        return _Beating(beat, self._without_others, kind, None, **kwargs)

    def prepare(self, batch: Any) -> None:
        super().prepare(batch)
        self.session.hold(self.model)

    def begin(self) -> None:
        """Begin to train, when all callbacks have begun."""
        session, model = self.session, self.model
        self._begun = True
        self._before = model._initial_epoch
        epoch, behind = session.begin(self._before or self.initial_epoch)
        if behind:
            # So that it reads what the others do, in the same order.
            epochs, self._left_out = self.epoch_iterator.pass_over(behind)
            epoch += epochs
            session.batches = behind
        if not session.has_left:
            session.start()
        model._initial_epoch = sys.maxsize if session.has_left else epoch

    def train(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Train on the next ``steps_per_execution`` batches."""
        logs = None
        for _ in range(self.model.steps_per_execution):
            if self._left_out:
                next(iterator)
                self._left_out -= 1
                continue
            try:
                with (
                    patches.shadowed(self.model, {"steps_per_execution": 1}),
                    self.session.model.in_place(),
                ):
                    logs = function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
            except tf.errors.OpError as error:
                with self.session.connection.naming_lost_servers():
                    raise error
            if not self.session.step():
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
        saves = {"save": self._save, "save_weights": self._save}
        with (
            _writes_to.filled(self.session),
            patches.shadowed(self.model, patches.bound(self.model, saves)),
        ):
            patches.replace(compat.KerasVariable, "assign", _assign)
            yield

    def _save(
        self, _: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Have the servers hold what a checkpoint does."""
        self.session.put_others()
        return original(*args, **kwargs)

    def end_of_steps(self, logs: Any) -> Any:
        self.session.put_others()
        return logs

    def _end(self, logs: Any) -> Any:
        logs = super()._end(logs)
        counts = self.session.counts
        if self._dropped is None or counts is None or self.session.rank > 0:
            return logs
        return {**logs, **self._dropped.logged(counts)}

    def end(self, error: BaseException | None) -> None:
        """End the training, as a whole or by an error."""
        if self._begun:
            self.model._initial_epoch = self._before
            self.session.end(error)


class _Beating(TowerEpochIterator):
    """Tells with each step that this worker goes on."""

    def __init__(self, beat: Callable[[], None], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._beat = beat

    def __next__(self) -> Any:
        step = super().__next__()
        self._beat()
        return step


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
        if not isinstance(call, ServedFit):
            raise TowerError(
                "the train function of a model whose weights parameter servers "
                "hold runs inside fit() only: call that."
            )
        return call.train(self._function, iterator)


class InStep(keras.callbacks.Callback):
    """Joins the other workers behind what all other callbacks have done."""

    def __init__(self, call: ServedFit):
        super().__init__()
        self._call = call

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over where the chief begins."""
        self._call.begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop where the chief stops."""
        model = self._call.model
        stops = self._call.session.end_epoch(epoch, bool(model.stop_training))
        model.stop_training = stops
