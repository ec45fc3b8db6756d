"""Callback wrappers that specify which ranks run a callback."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_towers.errors import TowerError
from keras_towers.meeting.check import Peers

_EVENTS = [n for n in dir(keras.callbacks.Callback) if n.startswith("on_")]


class _Marked(keras.callbacks.Callback):
    """A callback, marked with the ranks that run it."""

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise TowerError(
                f"{type(self).__name__} takes one Keras callback, but got "
                f"{callback!r}."
            )
        self.callback = callback

    def set_params(self, params: Any) -> None:
        """Hand the parameters on."""
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Hand the model on."""
        super().set_model(model)
        self.callback.set_model(model)


def _forwarding(name: str) -> Callable[..., None]:
    def forward(self: _Marked, *args: Any, **kwargs: Any) -> None:
        getattr(self.callback, name)(*args, **kwargs)

    return forward


# Where there is one process, nobody unwraps it, also without a strategy.
for _name in _EVENTS:
    setattr(_Marked, _name, _forwarding(_name))


class ChiefOnly(_Marked):
    """Runs a callback on rank 0 only.

    For callbacks that write files, draw or send messages. Keras's
    ``ModelCheckpoint``, ``BackupAndRestore``, ``TensorBoard`` and ``CSVLogger``
    run on rank 0 without it. Weights that the callback changes when training
    begins are sent to the other ranks immediately, later changes at the end of
    the epoch.

    Args:
        callback: any Keras callback. It must not call ``fit``, ``evaluate`` or
            ``predict``, which all ranks would have to call.

    Raises:
        TowerError: ``callback`` is not a callback.

    Example:
        >>> model.fit(x, y, callbacks=[kt.ChiefOnly(SendMail())])
    """


class EveryRank(_Marked):
    """Runs a callback on every rank, even if its default is rank 0 only.

    Args:
        callback: any Keras callback. If it writes files, their names have to
            differ between ranks.

    Raises:
        TowerError: ``callback`` is not a callback.

    Example:
        >>> log = keras.callbacks.CSVLogger(f"log-{strategy.rank}.csv")
        >>> model.fit(x, y, callbacks=[kt.EveryRank(log)])
    """


_SAVES = "_saves_by_itself"


def saves_by_itself(
    callback: keras.callbacks.Callback,
) -> keras.callbacks.Callback:
    """Let a callback write its files on this rank, whatever other ranks do."""
    for name in _EVENTS:
        method = getattr(callback, name)
        function = getattr(method, "__func__", method)
        inherited = function is getattr(keras.callbacks.Callback, name)
        if not inherited and not hasattr(method, _SAVES):
            setattr(callback, name, _by_itself(method))
    return callback


def _by_itself(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> None:
        from keras_towers.fit.hooks.saving import save_on_every_rank

        with save_on_every_rank():
            method(*args, **kwargs)

    setattr(run, _SAVES, True)
    return run


# Of a callback's method: it does not set ``model.stop_training``.
NEVER_STOPS = "_never_stops"


class ObservesFit(keras.callbacks.Callback):
    """Base of callbacks that observe a whole ``fit``, and its callbacks."""

    # Keras may go on calling others in a thread of their own.
    async_safe: bool = True
    first: keras.callbacks.Callback

    def around(
        self, model: keras.Model, config: Any, x: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Return the block that ``fit`` runs in; config None: plain Keras."""
        raise NotImplementedError


class Start(NamedTuple):
    """The epoch, batches done in it, and seed with which a ``fit`` starts."""

    epoch: int
    batch: int
    seed: int


class ResumesFit(keras.callbacks.Callback):
    """Base of callbacks that make ``fit`` start in the middle of an epoch."""

    def begin(self, peers: Peers) -> Start:
        """Return the start of ``fit``, the same on all ranks."""
        return self.start

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Return the block that ``fit`` runs in."""
        return contextlib.nullcontext()

    @property
    def start(self) -> Start:
        """The place at which ``fit`` starts."""
        raise NotImplementedError
