"""Callbacks of several ranks: who runs them, and effects that all take over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_towers.fit.calls import callbacks as callbacks_lib
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.calls.callbacks import (
    ChiefOnly,
    EveryRank,
    saves_by_itself,
)
from keras_towers.fit.calls.watched import (
    AROUND_BATCHES,
    CHIEF_ONLY,
    acts,
    watched,
)
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.hooks import saving
from keras_towers.fit.weights.adoption import Adoption, held_in_common
from keras_towers.meeting import check
from keras_towers.meeting.check import Peers
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport

logger = logging.getLogger("keras_towers")

Loop = Literal["train", "test", "predict"]

_ATTRIBUTES: dict[Loop, str] = {
    "train": "stop_training",
    "test": "stop_evaluating",
    "predict": "stop_predicting",
}

@contextlib.contextmanager
def adapted(
    config: TowerConfig, adoption: Adoption, call: TowerCall, nested: bool
) -> Iterator[None]:
    """Keep this rank's callbacks only, whose effects reach all ranks."""
    asked = call.asked
    # A nested call may be the validation of another one.
    if asked.kind.endswith("_on_batch"):
        yield
        return
    given = asked.given
    callbacks = given.get("callbacks")
    # A progress bar is on rank 0 only.
    if config.peers.rank > 0:
        given["verbose"] = 0
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = _of_this_rank(config.peers, callbacks)
    given["callbacks"] = callbacks
    listed = callbacks_lib.listed(callbacks)
    others = [c for c in listed if not isinstance(c, SyncedCallbacks)]
    synced = next((c for c in listed if c not in others), None)
    with contextlib.ExitStack() as stack:
        # The validation of fit has its callbacks.
        if config.transport.size > 1 and not (nested and synced):
            synced = SyncedCallbacks(config.transport, adoption, others)
            given["callbacks"] = callbacks_lib.with_added(callbacks, synced)
            watching = watched(others, synced.variables, synced.ran)
            stack.enter_context(watching)
        if synced is not None:
            call.agree = synced.agree
        yield


def _of_this_rank(peers: Peers, callbacks: Any) -> list[Any]:
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [] if callbacks is None else [callbacks]
    mine = []
    for callback in callbacks:
        chief_only = isinstance(callback, (*CHIEF_ONLY, ChiefOnly))
        own = saving.is_once() and (
            chief_only or isinstance(callback, EveryRank)
        )
        if isinstance(callback, (ChiefOnly, EveryRank)):
            callback = callback.callback
        if peers.rank == 0 or not chief_only:
            mine.append(saves_by_itself(callback) if own else callback)
    return mine


class SyncedCallbacks(keras.callbacks.Callback):
    """Propagates the effects of callbacks to all ranks."""

    # It runs after all others: one on any rank may have written weights, or
    # stopped the loop. A rank that left the loop by itself would be waited for
    # in the next step. The ranks agree around a batch only if one of them has a
    # callback with a method that Keras runs there, and before the first one
    # only if one has a callback.

    def __init__(
        self,
        transport: Transport,
        adoption: Adoption,
        callbacks: Iterable[Any],
    ):
        super().__init__()
        self._transport = transport
        self._adoption = adoption
        self._callbacks = list(callbacks)
        # The variables that callbacks have written, and who was the last.
        self._written: ByIdentity[keras.Variable, str] = ByIdentity(weak=False)
        self._asked: set[str] = set()
        self._depth = 0
        self._any = False
        self._told = False

    def variables(self) -> list[keras.Variable]:
        """Return what callbacks may write and ranks have in common."""
        return held_in_common(self.model)

    def ran(self, callback: Any, written: list[keras.Variable]) -> None:
        """Note what a callback has written."""
        for variable in written:
            self._written[variable] = type(callback).__name__

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over rank 0's place in the epochs, and what was restored."""
        begins = self._begin("train", self.model._initial_epoch)
        self.model._initial_epoch = begins[0]

    def on_test_begin(self, logs: Any = None) -> None:
        """Find out the callbacks, unless the call is part of a ``fit``."""
        self._begin("test")

    def on_predict_begin(self, logs: Any = None) -> None:
        """Find out the callbacks."""
        self._begin("predict")

    def on_train_end(self, logs: Any = None) -> None:
        """Take over what was written; forget the callbacks of this loop."""
        self._depth -= 1
        if self._any:
            self.agree()

    on_test_end = on_predict_end = on_train_end

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take over a stop that was set before the first batch."""
        if self._any:
            self.agree("train")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take over a stop that was set at the end of the epoch."""
        self._transport.mark(f"the end of epoch {epoch + 1}")
        self.agree("train")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the step begin: all other callbacks have run."""
        self._around_batch("train", 0, batch)
        self._adoption.begin_steps()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take over a stop."""
        self._around_batch("train", 1, batch)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the step begin."""
        self._around_batch("test", 0, batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take over a stop."""
        self._around_batch("test", 1, batch)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the step begin."""
        self._around_batch("predict", 0, batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take over a stop."""
        self._around_batch("predict", 1, batch)

    def _begin(self, loop: Loop, mine: Any = None) -> list[Any]:
        self._depth += 1
        begins: list[Any] = []
        if self._depth == 1:
            asked = [
                event
                for both in AROUND_BATCHES.values()
                for event in both
                if any(acts(callback, event) for callback in self._callbacks)
            ]
            ranks = check.gather(
                self._transport,
                (bool(self._callbacks), asked, mine),
                "begins to run callbacks",
            )
            self._any = any(rank[0] for rank in ranks)
            self._asked = {event for rank in ranks for event in rank[1]}
            begins = [rank[2] for rank in ranks]
        if self._any:
            self.agree(loop)
        return begins

    def _around_batch(self, loop: Loop, end: int, batch: int) -> None:
        event = AROUND_BATCHES[loop][end]
        if event in self._asked:
            self._transport.mark(f"{event} of batch {batch}")
            self.agree(loop)

    def agree(self, loop: Loop | None = None) -> None:
        """Take over what callbacks have written, and a stop of the loop."""
        name = "" if loop is None else _ATTRIBUTES[loop]
        stops = bool(name) and bool(getattr(self.model, name))
        mine = tf.constant([int(stops), len(self._written)])
        (told,) = sum_over_ranks(self._transport, [mine])
        stop, written = told.numpy()
        if name:
            setattr(self.model, name, bool(stop))
        if written:
            self._take_over()

    def _take_over(self) -> None:
        """Give all ranks what callbacks of some have written."""
        unlike = self._adoption.take_over(self.model, self._written)
        self._written.clear()
        if unlike and not self._told and self._transport.rank == 0:
            self._told = True
            logger.warning(
                "callbacks have written other values into %s on some ranks "
                "(%s): all go on with those of the first of them.",
                *unlike,
            )
