"""The roles of callbacks: which ranks run them, and where ``fit`` starts.

``callback_effects.py`` makes their effects the same on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from keras_towers.fit.calls import saving
from keras_towers.fit.components import FitStart, KerasCall, TowerConfig
from keras_towers.fit.context import patches
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights.copies import copy_to_towers
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.foundation.system import absolute
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers

# These compare several epochs, and start afresh when training begins.
_COUNTING = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)

_Kind = TypeVar("_Kind")
# Also the older ``on_batch_*``, which Keras still calls.
ALL_EVENTS = [n for n in dir(keras.callbacks.Callback) if n.startswith("on_")]
_FORWARDED = frozenset((*ALL_EVENTS, "set_params", "set_model"))
# Callbacks that the first rank with a path runs, and the path's attribute.
_WRITTEN: dict[type, str] = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
}
if compat.KERAS >= (3, 14):
    _WRITTEN[keras.callbacks.OrbaxCheckpoint] = "directory"
# Ranks would overwrite each other's files or repeat each other's output.
CHIEF_ONLY = (
    *_WRITTEN,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


Callbacks: TypeAlias = "keras.callbacks.CallbackList | Sequence | None"
"""The callbacks that ``fit`` takes."""


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

    def __getattribute__(self, name: str) -> Any:
        """Forward attributes to the callback, as Keras does not unwrap it."""
        if name in _FORWARDED:
            return getattr(self.callback, name)
        return super().__getattribute__(name)


class ChiefOnly(_Marked):
    """Runs a callback on rank 0 only.

    Use it for callbacks that write files, draw or send messages. Some of
    Keras's own do so without it: ``BackupAndRestore`` and ``TensorBoard`` and,
    if all ranks give the same path, ``ModelCheckpoint``, ``OrbaxCheckpoint``
    and ``CSVLogger``. If the callback writes weights or learning rates, the
    other ranks get them at once; with parameter servers, other workers get
    weights with the next update or the next epoch.

    Args:
        callback: any Keras callback. It may call ``evaluate`` and ``predict``,
            which run on rank 0 alone, but not ``fit``, which needs all ranks.

    Raises:
        TowerError: ``callback`` is not a callback.

    Example:
        >>> model.fit(x, y, callbacks=[kt.ChiefOnly(SendMail())])
    """


class EveryRank(_Marked):
    """Runs a callback on every rank, even if its default is rank 0 only.

    Args:
        callback: any Keras callback. If it writes files, their names must
            differ between ranks.

    Raises:
        TowerError: ``callback`` is not a callback.

    Example:
        >>> log = keras.callbacks.CSVLogger(f"log-{strategy.rank}.csv")
        >>> model.fit(x, y, callbacks=[kt.EveryRank(log)])
    """


class ObservesFit(keras.callbacks.Callback):
    """Base of callbacks that observe ``fit`` and its other callbacks."""

    # Keras may still call the other callbacks in a separate thread.
    async_safe: bool = True
    first: keras.callbacks.Callback

    def around(
        self, model: keras.Model, config: TowerConfig | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the block that ``fit`` runs in; config None: plain Keras."""
        raise NotImplementedError


class ResumesFit(keras.callbacks.Callback):
    """Base of callbacks that make ``fit`` start in the middle of an epoch."""

    def find_start(
        self, peers: Peers, model: keras.Model, first: int
    ) -> FitStart:
        """Return the start of ``fit``, the same on all ranks.

        Args:
            peers: all ranks.
            model: the model that it trains.
            first: the epoch in which it starts by itself.
        """
        raise NotImplementedError

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Return the block that ``fit`` runs in."""
        raise NotImplementedError


def listed(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return callbacks, in any form that Keras accepts, as a flat list."""
    flat = []
    for callback in tf.nest.flatten(callbacks):
        if isinstance(callback, compat.CallbackList):
            flat += listed(callback.callbacks)
        elif callback is not None:
            flat.append(callback)
    return flat


def with_added(callbacks: Any, added: keras.callbacks.Callback) -> Callbacks:
    """Append a callback to the callbacks of ``fit``."""
    if isinstance(callbacks, compat.CallbackList):
        added.set_params(callbacks.params)
        # A list may have been created without a model.
        added.set_model(getattr(callbacks, "model", None))
    return in_form_of(callbacks, [*listed(callbacks), added])


def in_form_of(
    passed: Any, callbacks: list[keras.callbacks.Callback]
) -> Callbacks:
    """Return callbacks in the form in which ``fit`` was given others."""
    if not isinstance(passed, compat.CallbackList):
        return callbacks
    # Copied: the user may use the list again, with its own callbacks.
    copied = copy.copy(passed)
    copied.callbacks = callbacks
    # Keras would call all of them in another thread if those that the list was
    # created with have nothing to do after a batch.
    copied._async_train = copied._async_test = copied._async_predict = False
    return copied


def only_one(wanted: type[_Kind], keras_call: KerasCall) -> _Kind | None:
    """Return the callback of a type that was passed to ``fit``, or None.

    Raises:
        TowerError: there are several, or one is wrapped in ``ChiefOnly`` or
            ``EveryRank``.
    """
    if keras_call.kind != "fit":
        return None
    callbacks = listed(keras_call.arguments.get("callbacks"))
    for callback in callbacks:
        inner = getattr(callback, "callback", None)
        if isinstance(callback, ChiefOnly | EveryRank) and isinstance(
            inner, wanted
        ):
            raise TowerError(
                f"{type(inner).__name__} itself decides what each rank does: "
                f"give it without {type(callback).__name__}."
            )
    chosen = [c for c in callbacks if isinstance(c, wanted)]
    if len(chosen) > 1:
        names = " and ".join(type(callback).__name__ for callback in chosen)
        raise TowerError(f"fit cannot run {names} together: give one of them.")
    return chosen[0] if chosen else None


@contextlib.contextmanager
def observed(
    keras_call: KerasCall, config: TowerConfig | None = None
) -> Iterator[None]:
    """Run the observing callback, if any, around this block."""
    # Without towers (``config`` is None) Keras trains as without a strategy.
    observer = only_one(ObservesFit, keras_call)
    if observer is None:
        yield
        return
    arguments = keras_call.arguments
    callbacks = arguments["callbacks"]
    others = [c for c in listed(callbacks) if c is not observer]
    ordered = [observer.first, *others, observer]
    arguments["callbacks"] = in_form_of(callbacks, ordered)
    with observer.around(keras_call.model, config):
        yield


def warn_of_counters(arguments: Mapping[str, Any]) -> None:
    """Warn of callbacks that restart their counters when ``fit`` resumes."""
    names = [
        type(callback).__name__
        for callback in listed(arguments.get("callbacks"))
        if isinstance(callback, _COUNTING)
        or getattr(callback, "save_best_only", False)
    ]
    if names:
        logger.warning(
            "fit resumes, but %s starts afresh: a backup does not keep its "
            "counts and its best value.",
            ", ".join(names),
        )


def own_paths(peers: Peers, callbacks: Callbacks) -> set[str]:
    """Return the files of callbacks that no lower rank writes. Collective."""
    paths = [*filter(None, map(_path_of, listed(callbacks)))]
    ranks = rank_checks.gather(peers, paths, "begins to choose callbacks")
    return set(paths).difference(*ranks[: peers.rank])


def _path_of(callback: keras.callbacks.Callback) -> str:
    for kind, name in _WRITTEN.items():
        if isinstance(callback, kind):
            return os.path.normpath(absolute(getattr(callback, name)))
    return ""


def callbacks_of_rank(
    peers: Peers,
    callbacks: Callbacks,
    stack: contextlib.ExitStack,
    own: Collection[str] = (),
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that this rank runs.

    Until ``stack`` closes, some of them save files without the other ranks.

    Args:
        peers: all ranks.
        callbacks: those that the call got.
        stack: closes when the call ends.
        own: the result of ``own_paths``; empty: rank 0 alone writes.
    """
    callbacks_here = []
    for callback in listed(callbacks):
        chief_only = isinstance(callback, (*CHIEF_ONLY, ChiefOnly))
        saves_here = chief_only or isinstance(callback, EveryRank)
        if isinstance(callback, (ChiefOnly, EveryRank)):
            callback = callback.callback
        is_own = _path_of(callback) in own
        if peers.rank == 0 or not chief_only or is_own:
            callbacks_here.append(callback)
            if saves_here and peers.size > 1:
                # It does not wait for other ranks.
                saves = {}
                for event in ALL_EVENTS:
                    method = getattr(callback, event)
                    empty = getattr(keras.callbacks.Callback, event)
                    if getattr(method, "__func__", method) is not empty:
                        saves[event] = saving.save_on_every_rank()(method)
                stack.enter_context(patches.shadowed(callback, saves))
    return callbacks_here


def swapping_on_first_tower(
    arguments: Mapping[str, Any],
) -> contextlib.AbstractContextManager[None]:
    """Make ``SwapEMAWeights`` work with weights on towers in this block."""
    callbacks, kind = arguments.get("callbacks"), keras.callbacks.SwapEMAWeights
    swaps = [each for each in listed(callbacks) if isinstance(each, kind)]
    return patches.overridden(swaps, lambda _: _SWAPS)


def _on_first_tower(
    callback: keras.callbacks.Callback,
    original: patches.Original,
    optimizer: keras.Optimizer,
) -> None:
    variables = list(optimizer._trainable_variables)
    with as_one_device(optimizer, variables):
        original(optimizer)
    copy_to_towers([*variables, *optimizer.variables])


_SWAPS: patches.Shadows = {
    "_tf_swap_variables": _on_first_tower,
    "_tf_finalize_ema_values": _on_first_tower,
}
