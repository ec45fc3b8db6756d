"""Callbacks of several ranks: who runs them, and effects that all take over."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_towers.fit.calls import callbacks as callbacks_lib
from keras_towers.fit.calls.callbacks import (
    NEVER_STOPS,
    ChiefOnly,
    EveryRank,
    saves_by_itself,
)
from keras_towers.fit.contract import KerasCall, TowerConfig
from keras_towers.fit.hooks import saving
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.meeting import check
from keras_towers.meeting.check import Peers
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport

Loop = Literal["train", "test", "predict"]

_ATTRIBUTES: dict[Loop, str] = {
    "train": "stop_training",
    "test": "stop_evaluating",
    "predict": "stop_predicting",
}
# Ranks would overwrite each other's files or repeat each other's output.
_CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# What these do around a batch stops no loop.
_NEVER_STOP = (keras.callbacks.Callback, *_CHIEF_ONLY)


def adapt(
    config: TowerConfig,
    adoption: Adoption,
    asked: KerasCall,
    nested: bool,
) -> None:
    """Keep this rank's callbacks only, and a progress bar on rank 0 only."""
    # A nested call may be the validation of another one.
    if asked.kind.endswith("_on_batch"):
        return
    given = asked.given
    callbacks = given.get("callbacks")
    if config.peers.rank > 0:
        given["verbose"] = 0
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = _of_this_rank(config.peers, callbacks)
    listed = callbacks_lib.listed(callbacks)
    # The validation of fit has its callbacks.
    has_one = nested and any(isinstance(c, SyncedCallbacks) for c in listed)
    if config.transport.size > 1 and not has_one:
        others = [c for c in listed if not isinstance(c, SyncedCallbacks)]
        synced = SyncedCallbacks(config.transport, adoption, others)
        callbacks = callbacks_lib.with_added(callbacks, synced)
    given["callbacks"] = callbacks


def _of_this_rank(peers: Peers, callbacks: Any) -> list[Any]:
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [] if callbacks is None else [callbacks]
    mine = []
    for callback in callbacks:
        chief_only = isinstance(callback, (*_CHIEF_ONLY, ChiefOnly))
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

    # It runs after all others: one on rank 0 may have restored weights, and one
    # on any rank may have stopped the loop. A rank that left the loop by itself
    # would be waited for in the next step. The ranks agree after every batch
    # only if one of them has a callback with a method that Keras runs there,
    # and before the first one only if one has a callback.

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
        self._asked: dict[Loop, bool] = {}
        self._depth = 0
        self._any = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over rank 0's place in the epochs, and its weights."""
        begins = self._begin(self.model._initial_epoch)
        self.model._initial_epoch = begins[0]
        if self._any:
            self._adoption.copy_from_first(self.model)

    def on_test_begin(self, logs: Any = None) -> None:
        """Find out the callbacks, unless the call is part of a ``fit``."""
        self._begin()

    on_predict_begin = on_test_begin

    def on_train_end(self, logs: Any = None) -> None:
        """Forget the callbacks, unless an outer loop goes on."""
        self._depth -= 1

    on_test_end = on_predict_end = on_train_end

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take over a stop that was set before the first batch."""
        if self._any:
            self._agree("train")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take over a stop that was set at the end of the epoch."""
        self._transport.mark(f"the end of epoch {epoch + 1}")
        self._agree("train")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the step begin: all other callbacks have run."""
        self._adoption.begin_steps()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take over a stop."""
        self._after_batch("train", batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take over a stop."""
        self._after_batch("test", batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take over a stop."""
        self._after_batch("predict", batch)

    def _begin(self, mine: Any = None) -> list[Any]:
        self._depth += 1
        if self._depth > 1:
            return []
        stop = {
            loop: any(_may_stop(loop, c) for c in self._callbacks)
            for loop in _ATTRIBUTES
        }
        ranks = check.gather(
            self._transport,
            (bool(self._callbacks), stop, mine),
            "begins to run callbacks",
        )
        self._any = any(rank[0] for rank in ranks)
        self._asked = {
            loop: any(rank[1][loop] for rank in ranks) for loop in _ATTRIBUTES
        }
        return [rank[2] for rank in ranks]

    def _after_batch(self, loop: Loop, batch: int) -> None:
        if self._asked[loop]:
            self._transport.mark(f"the end of {loop} batch {batch}")
            self._agree(loop)

    def _agree(self, loop: Loop) -> None:
        name = _ATTRIBUTES[loop]
        mine = tf.constant(int(getattr(self.model, name)))
        (stops,) = sum_over_ranks(self._transport, [mine])
        setattr(self.model, name, int(stops) > 0)


def _may_stop(loop: Loop, callback: Any) -> bool:
    """Whether a callback does anything around a batch that may stop a loop."""
    hooks = [f"on_{loop}_batch_begin", f"on_{loop}_batch_end"]
    if loop == "train":
        hooks += ["on_batch_begin", "on_batch_end"]
    harmless = {
        vars(cls).get(hook) for cls in _NEVER_STOP for hook in hooks
    } - {None}
    # A callback of no class of Keras's may lack some.
    methods = [
        inspect.unwrap(getattr(callback, hook))
        for hook in hooks
        if hasattr(callback, hook)
    ]
    functions = (getattr(method, "__func__", method) for method in methods)
    return any(
        function not in harmless and not hasattr(function, NEVER_STOPS)
        for function in functions
    )
