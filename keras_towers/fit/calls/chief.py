"""Restricting callbacks and output to rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_towers.fit.callbacks import ChiefOnly, EveryRank, saves_by_itself
from keras_towers.fit.calls import callbacks as callbacks_lib
from keras_towers.fit.calls.together import Together
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.hooks import saving
from keras_towers.fit.weights.adoption import Adoption
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
    nested: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Adapt the arguments of a Keras method to this rank.

    Args:
        config: the towers.
        adoption: the models placed on the towers.
        method: the method, as Keras defines it.
        args: the user's positional arguments, without the model.
        kwargs: the user's keyword arguments.
        nested: whether another call runs, of which this may be the validation.

    Returns:
        Positional and keyword arguments, with only this rank's callbacks and
        a progress bar on rank 0 only.
    """
    if config.peers.size == 1 or not callbacks_lib.are_taken_by(method):
        return args, kwargs
    given = callbacks_lib.by_name(method, args, kwargs)
    callbacks = given.get("callbacks")
    if config.peers.rank > 0:
        given["verbose"] = 0
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = _of_this_rank(config.peers, callbacks)
    listed = callbacks_lib.listed(callbacks)
    # The validation of fit has its callbacks.
    has_one = nested and any(isinstance(c, Together) for c in listed)
    if config.transport.size > 1 and not has_one:
        others = [c for c in listed if not isinstance(c, Together)]
        together = Together(config.transport, adoption, others)
        callbacks = callbacks_lib.with_added(callbacks, together)
    given["callbacks"] = callbacks
    return (), given


def _of_this_rank(transport: Transport, callbacks: Any) -> list[Any]:
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
        if transport.rank == 0 or not chief_only:
            mine.append(saves_by_itself(callback) if own else callback)
    return mine
