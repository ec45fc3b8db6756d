"""Restricting callbacks and output to rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers.callbacks import ChiefOnly, EveryRank
from keras_towers.fit.calls import callbacks as callbacks_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport

# Ranks would overwrite each other's files or repeat each other's output.
_CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


def arguments(
    config: TowerConfig,
    adoption: Adoption,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Adapt the arguments of a Keras method to this rank.

    Args:
        config: the towers.
        adoption: the models placed on the towers.
        method: the method, as Keras defines it.
        args: the user's positional arguments, without the model.
        kwargs: the user's keyword arguments.

    Returns:
        Positional and keyword arguments, with only this rank's callbacks and
        a progress bar on rank 0 only.
    """
    if config.transport.size == 1 or not callbacks_lib.are_taken_by(method):
        return args, kwargs
    given = callbacks_lib.by_name(method, args, kwargs)
    callbacks = given.get("callbacks")
    if config.transport.rank > 0:
        given["verbose"] = 0
    others = True
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = _of_this_rank(config.transport, callbacks)
        others = bool(callbacks)
    if method.__name__ == "fit":
        together = _Together(config.transport, adoption, others)
        callbacks = callbacks_lib.with_added(callbacks, together)
    given["callbacks"] = callbacks
    return (), given


def _of_this_rank(transport: Transport, callbacks: Any) -> list[Any]:
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [] if callbacks is None else [callbacks]
    mine = []
    for callback in callbacks:
        chief_only = isinstance(callback, (*_CHIEF_ONLY, ChiefOnly))
        if isinstance(callback, (ChiefOnly, EveryRank)):
            callback = callback.callback
        if transport.rank == 0 or not chief_only:
            mine.append(callback)
    return mine


class _Together(keras.callbacks.Callback):
    """Propagates the effects of callbacks to all ranks.

    It runs after the user's callbacks: one on rank 0 may have restored
    weights, and one on any rank may have stopped training.

    Args:
        transport: connects the processes.
        adoption: the models placed on the towers.
        others: whether this rank has other callbacks.
    """

    def __init__(self, transport: Transport, adoption: Adoption, others: bool):
        super().__init__()
        self._transport = transport
        self._adoption = adoption
        self._others = others

    def on_train_begin(self, logs: Any = None) -> None:
        transport = self._transport
        transport.mark("the beginning of fit")
        places = transport.gather_objects(
            (self.model._initial_epoch, self._others)
        )
        self.model._initial_epoch = places[0][0]
        if any(others for _, others in places):
            self._adoption.copy_from_first(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._transport.mark(f"the end of epoch {epoch + 1}")
        stops = tf.constant(int(self.model.stop_training))
        (stops,) = sum_over_ranks(self._transport, [stops])
        self.model.stop_training = int(stops) > 0
