"""Side effects of a call of ``fit`` that only one rank is to have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers.callbacks import ChiefOnly, EveryRank, ResumesFit, Start
from keras_towers.reduction import sum_over_ranks

# They write files, which ranks would write over each other.
_CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


def arguments(
    strategy: Any, method: Callable, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """The arguments that a method of Keras gets on this rank.

    Args:
        strategy: the strategy.
        method: the method, as Keras defines it.
        args: what the user gave, without the model.
        kwargs: what the user gave by name.

    Returns:
        What to call it with, by position and by name: the callbacks of this
        rank, and a progress bar on rank 0 alone.
    """
    if strategy.transport.size == 1 or not _takes_callbacks(method):
        return args, kwargs
    given = _by_name(method, args, kwargs)
    if strategy.transport.rank > 0:
        given["verbose"] = 0
    callbacks = given.get("callbacks")
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        given["callbacks"] = callbacks = _of_this_rank(strategy, callbacks)
        others = bool(callbacks)
    else:
        others = True
    if method.__name__ == "fit":
        callbacks.append(_Together(strategy, others))
    return (), given


def _takes_callbacks(method: Callable) -> bool:
    return "callbacks" in inspect.signature(method).parameters


def _by_name(method: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    given = inspect.signature(method).bind(None, *args, **kwargs).arguments
    del given["self"]
    given.update(given.pop("kwargs", {}))
    return given


def start(
    method: Callable, args: tuple, kwargs: dict
) -> tuple[Start | None, tuple, dict]:
    """Where a call begins in its data, if one of its callbacks says so.

    Returns:
        The start or None, and the arguments to call the method with.
    """
    if method.__name__ != "fit":
        return None, args, kwargs
    given = _by_name(method, args, kwargs)
    for callback in tf.nest.flatten(given.get("callbacks")):
        if isinstance(callback, ResumesFit):
            begin = callback.start
            return begin, (), {**given, "initial_epoch": begin.epoch}
    return None, args, kwargs


def _of_this_rank(strategy: Any, callbacks: Any) -> list[Any]:
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [] if callbacks is None else [callbacks]
    mine = []
    for callback in callbacks:
        chief_only = isinstance(callback, (*_CHIEF_ONLY, ChiefOnly))
        if isinstance(callback, (ChiefOnly, EveryRank)):
            callback = callback.callback
        if strategy.transport.rank == 0 or not chief_only:
            mine.append(callback)
    return mine


class _Together(keras.callbacks.Callback):
    """Makes what callbacks do on some ranks happen on all of them.

    It comes after the user's callbacks: one on rank 0 may have restored
    weights, or any of them may have stopped training.

    Args:
        strategy: the strategy.
        others: whether there are other callbacks on this rank.
    """

    def __init__(self, strategy: Any, others: bool):
        super().__init__()
        self._strategy = strategy
        self._others = others

    def on_train_begin(self, logs: Any = None) -> None:
        transport = self._strategy.transport
        transport.mark("the beginning of fit")
        places = transport.gather_objects(
            (self.model._initial_epoch, self._others)
        )
        self.model._initial_epoch = places[0][0]
        if any(others for _, others in places):
            self._strategy.adoption.hand_out(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._strategy.transport.mark(f"the end of epoch {epoch + 1}")
        stops = tf.constant(int(self.model.stop_training))
        (stops,) = sum_over_ranks(self._strategy.transport, [stops])
        self.model.stop_training = int(stops) > 0
