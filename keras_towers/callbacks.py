"""What a user puts in ``callbacks=[...]`` to say which processes run it."""

from __future__ import annotations

from typing import NamedTuple

import keras

from keras_towers.errors import TowerError


class _Marked(keras.callbacks.Callback):
    """Another callback, and who is to run it."""

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise TowerError(
                f"{type(self).__name__} takes one Keras callback, and was "
                f"given {callback!r}."
            )
        self.callback = callback


class ChiefOnly(_Marked):
    """Runs a callback on rank 0 alone.

    For what writes files, draws or sends messages. Keras's ``ModelCheckpoint``,
    ``BackupAndRestore``, ``TensorBoard`` and ``CSVLogger`` run so by
    themselves. Weights that it changes when training begins reach the other
    ranks then, later changes at the end of the epoch.

    Args:
        callback: any Keras callback. It must not call ``fit``, ``evaluate`` or
            ``predict``, for which the other ranks would have to be there.

    Raises:
        TowerError: it is not a callback.

    Example:
        >>> model.fit(x, y, callbacks=[kt.ChiefOnly(SendMail())])
    """


class EveryRank(_Marked):
    """Runs a callback on every rank, also one that only rank 0 would run.

    Args:
        callback: any Keras callback. Where it writes files, their names have
            to differ between the ranks.

    Raises:
        TowerError: it is not a callback.

    Example:
        >>> log = keras.callbacks.CSVLogger(f"log-{strategy.rank}.csv")
        >>> model.fit(x, y, callbacks=[kt.EveryRank(log)])
    """


class Start(NamedTuple):
    """Where a call of ``fit`` begins.

    Attributes:
        epoch: the epoch, from 0.
        batch: how many of its global batches are done.
        seed: what the order of shuffled examples follows from.
    """

    epoch: int
    batch: int
    seed: int


class ResumesFit(keras.callbacks.Callback):
    """Base of callbacks that let ``fit`` begin in the middle of an epoch."""

    @property
    def start(self) -> Start:
        """Where ``fit`` begins."""
        raise NotImplementedError
