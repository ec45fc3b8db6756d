"""Callbacks: which ranks run them, and what they require of ``fit``."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import first_time
from keras_towers.errors import TowerError
from keras_towers.fit import rank_agreement
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import KerasCall, Start, TowerConfig
from keras_towers.fit.hooks import saving
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.fit.weights.adoption import Adoption, shared_variables
from keras_towers.reduction import sum_over_ranks
from keras_towers.rendezvous import check
from keras_towers.rendezvous.check import Peers
from keras_towers.transport import Transport

if TYPE_CHECKING:
    from keras_towers.fit.calls.call import TowerCall

logger = logging.getLogger("keras_towers")

# These compare several epochs, and start afresh when training begins.
_COUNTING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
)

_Kind = TypeVar("_Kind")
ALL_EVENTS = [n for n in dir(keras.callbacks.Callback) if n.startswith("on_")]
_FORWARDED = frozenset((*ALL_EVENTS, "set_params", "set_model"))
_STOPS = ("stop_training", "stop_evaluating", "stop_predicting")
# Keras calls the older ``on_batch_*`` from ``on_train_batch_*``.
_SYNCED_EVENTS = [e for e in ALL_EVENTS if not e.startswith("on_batch")]
# Ranks would overwrite each other's files or repeat each other's output.
_CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# The batch methods of these classes stop no loop and write no weights.
_HARMLESS = (keras.callbacks.Callback, *_CHIEF_ONLY)
# Ranks with their own data predict different numbers of batches.
_AFTER_PREDICT = {"on_predict_batch.*": "on_predict_end"}


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
        """Forward what Keras calls: a single process does not unwrap it."""
        if name in _FORWARDED:
            return getattr(self.callback, name)
        return super().__getattribute__(name)


class ChiefOnly(_Marked):
    """Runs a callback on rank 0 only.

    For callbacks that write files, draw or send messages. Keras's
    ``ModelCheckpoint``, ``BackupAndRestore``, ``TensorBoard`` and ``CSVLogger``
    run on rank 0 without it. Weights and learning rates that the callback
    writes are sent to the other ranks at once.

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


# Attribute of a callback's method that stops no loop and writes no weights.
NEVER_STOPS = "_never_stops"


class ObservesFit(keras.callbacks.Callback):
    """Base of callbacks that observe ``fit`` and its other callbacks."""

    # Keras may still call the other callbacks in a separate thread.
    async_safe: bool = True
    first: keras.callbacks.Callback

    def around(
        self, model: keras.Model, config: Any, x: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Return the block that ``fit`` runs in; config None: plain Keras."""
        raise NotImplementedError


class ResumesFit(keras.callbacks.Callback):
    """Base of callbacks that make ``fit`` start in the middle of an epoch."""

    def begin(self, peers: Peers) -> Start:
        """Return the start of ``fit``, the same on all ranks."""
        raise NotImplementedError

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Return the block that ``fit`` runs in."""
        raise NotImplementedError


def listed(callbacks: Any) -> list[Any]:
    """Return callbacks, in any form that Keras accepts, as a flat list."""
    flat = []
    for callback in tf.nest.flatten(callbacks):
        if isinstance(callback, compat.CallbackList):
            flat += listed(callback.callbacks)
        elif callback is not None:
            flat.append(callback)
    return flat


def with_added(callbacks: Any, added: keras.callbacks.Callback) -> Any:
    """Append a callback to the callbacks of ``fit``."""
    if isinstance(callbacks, compat.CallbackList):
        added.set_params(callbacks.params)
        # A list may have been created without a model.
        added.set_model(getattr(callbacks, "model", None))
    return in_form_of(callbacks, [*listed(callbacks), added])


def in_form_of(given: Any, callbacks: list[Any]) -> Any:
    """Return callbacks of ``fit`` in the form in which it was given others."""
    if not isinstance(given, compat.CallbackList):
        return callbacks
    # Copied: the user may use the list again, with its own callbacks.
    copied = copy.copy(given)
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
        held = getattr(callback, "callback", None)
        if isinstance(callback, ChiefOnly | EveryRank) and isinstance(
            held, wanted
        ):
            raise TowerError(
                f"{type(held).__name__} already decides which rank does what: "
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
    with contextlib.ExitStack() as stack:
        if isinstance(callbacks, compat.CallbackList):
            stack.callback(setattr, callbacks, "callbacks", callbacks.callbacks)
            callbacks.callbacks = ordered
        else:
            arguments["callbacks"] = ordered
        stack.enter_context(
            observer.around(keras_call.model, config, arguments["x"])
        )
        yield


def warn_of_counters(arguments: dict[str, Any]) -> None:
    """Warn of callbacks that restart their counters when ``fit`` resumes."""
    names = [
        type(callback).__name__
        for callback in listed(arguments.get("callbacks"))
        if isinstance(callback, _COUNTING)
        or getattr(callback, "save_best_only", False)
    ]
    if names:
        logger.warning(
            "fit resumes in the middle, but %s starts afresh: its counts and "
            "its best value so far are not kept.",
            ", ".join(names),
        )


@contextlib.contextmanager
def adapted(
    config: TowerConfig, adoption: Adoption, call: TowerCall, nested: bool
) -> Iterator[None]:
    """Keep only this rank's callbacks, and share their effects."""
    arguments = call.keras_call.arguments
    if call.kind.endswith("_on_batch"):
        yield
        return
    callbacks = arguments.get("callbacks")
    # Only rank 0 shows a progress bar.
    if config.peers.rank > 0:
        arguments["verbose"] = 0
    synced = [c for c in listed(callbacks) if isinstance(c, SyncedCallbacks)]
    # Validation inside fit runs the callbacks of that fit.
    if nested and (synced or arguments.get("_use_cached_eval_dataset")):
        if synced:
            call.agree = synced[0].agree
        yield
        return
    with contextlib.ExitStack() as stack:
        callers = _of_this_rank(config.peers, callbacks, stack)
        callbacks = in_form_of(callbacks, callers)
        if config.transport.size > 1:
            last = SyncedCallbacks(
                config.transport,
                callers,
                shared_variables,
                adoption,
                moved=_AFTER_PREDICT if config.runs_alone(call.kind) else {},
            )
            callbacks = with_added(callbacks, last)
            call.agree = last.agree
            stack.enter_context(last.watching())
        arguments["callbacks"] = callbacks
        yield


def _of_this_rank(
    peers: Peers, callbacks: Any, stack: contextlib.ExitStack
) -> list[Any]:
    """Return the callbacks that this rank runs.

    In the block of ``stack`` some of them save without the other ranks.
    """
    callbacks_here = []
    for callback in listed(callbacks):
        chief_only = isinstance(callback, (*_CHIEF_ONLY, ChiefOnly))
        saves_here = chief_only or isinstance(callback, EveryRank)
        if isinstance(callback, (ChiefOnly, EveryRank)):
            callback = callback.callback
        if peers.rank == 0 or not chief_only:
            callbacks_here.append(callback)
            if saving.is_once() and saves_here:
                saves = {
                    event: _saving_on_this_rank(getattr(callback, event))
                    for event in ALL_EVENTS
                    if _overrides(callback, event)
                }
                stack.enter_context(patches.shadowed(callback, saves))
    return callbacks_here


def _overrides(callback: Any, event: str) -> bool:
    """Whether a callback overrides Keras's empty method for an event."""
    method = getattr(callback, event)
    inherited = getattr(keras.callbacks.Callback, event)
    return getattr(method, "__func__", method) is not inherited


def _saving_on_this_rank(method: Callable[..., None]) -> Callable[..., None]:
    """Let a callback write its files without waiting for other ranks."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> None:
        with saving.save_on_every_rank():
            method(*args, **kwargs)

    return run


class SyncedCallbacks(keras.callbacks.Callback):
    """Propagates the effects of callbacks to all ranks. Collective."""

    # It runs after all other callbacks, since a callback on any rank may write
    # weights or stop the loop. If a single rank left the loop, the next step of
    # the other ranks would wait for it. The ranks agree at an event only if a
    # callback on one of them acts there. ``moved`` maps patterns of events that
    # ranks reach independently to the event at which they agree instead.

    def __init__(
        self,
        transport: Transport,
        callbacks: list[Any],
        variables: Callable[[keras.Model], list[keras.Variable]],
        adoption: Adoption | None = None,
        moved: Mapping[str, str] = types.MappingProxyType({}),
    ):
        super().__init__()
        self._transport = transport
        self._callbacks = callbacks
        self._variables = variables
        self._adoption = adoption
        # The variables that callbacks have written, and the last writer's name.
        self._written: IdentityDict[keras.Variable, str] = IdentityDict()
        acting = [
            e for e in _SYNCED_EVENTS if any(_acts(c, e) for c in callbacks)
        ]
        for pattern, event in moved.items():
            acting = [re.sub(pattern, event, e) for e in acting]
        ranks = check.gather(transport, acting, "begins to run callbacks")
        self._events: set[str] = set(itertools.chain(*ranks))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the variables that callbacks write in this block."""
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                run = {
                    e: self._run for e in _SYNCED_EVENTS if _acts(callback, e)
                }
                bound = patches.bind_to(callback, run)
                stack.enter_context(patches.shadowed(callback, bound))
            yield

    def _run(
        self, callback: Any, original: Callable, *args: Any, **kwargs: Any
    ) -> None:
        before = [(v, _value(v)) for v in self._variables(self.model)]
        original(*args, **kwargs)
        for variable, value in before:
            if not _is_same(value, _value(variable)):
                self._written[variable] = type(callback).__name__

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin the step, after all other callbacks."""
        self._settle("on_train_batch_begin")
        if self._adoption is not None:
            self._adoption.begin_steps(self.model)

    def _settle(self, event: str, *args: Any, **kwargs: Any) -> None:
        if event in self._events:
            self._transport.mark(event)
            self.agree()

    def agree(self) -> None:
        """Share the values that callbacks wrote, and their requests to stop."""
        model = self.model
        stops = [bool(getattr(model, name, False)) for name in _STOPS]
        # A callback of rank 0 may have restored the epoch to continue with.
        first = 0 if self._transport.rank else model._initial_epoch or 0
        requests = tf.constant([*map(int, stops), first, len(self._written)])
        *requested, first, written = sum_over_ranks(
            self._transport, [requests]
        )[0]
        model._initial_epoch = int(first) or None
        for name, stopped, stop in zip(_STOPS, stops, requested, strict=True):
            if stop and not stopped:
                setattr(model, name, True)
        if written:
            self._take_over()

    def _take_over(self) -> None:
        """Give all ranks the values that callbacks of any rank have written."""
        variables = self._variables(self.model)
        written = {
            str(index): (
                rank_agreement.digest_of(variable),
                self._written[variable],
            )
            for index, variable in enumerate(variables)
            if variable in self._written
        }
        self._written.clear()
        ranks = check.gather(
            self._transport, written, "takes over what callbacks wrote"
        )
        adoption = self._adoption
        apart = adoption is not None and adoption.ranks_diverge(self.model)
        roots: dict[int, list[keras.Variable]] = {}
        conflict = ""
        for index in dict.fromkeys(itertools.chain(*ranks)):
            by_rank = {
                r: own[index] for r, own in enumerate(ranks) if index in own
            }
            differ = len({digest for digest, _ in by_rank.values()}) > 1
            if len(by_rank) == len(ranks) and (apart or not differ):
                continue
            variable = variables[int(index)]
            roots.setdefault(min(by_rank), []).append(variable)
            if differ:
                names = (f"rank {r}: {n}" for r, (_, n) in by_rank.items())
                conflict = f"{variable.path} ({', '.join(names)})"
        if roots and self._adoption is not None:
            self._adoption.update.gather_slots()
        for root, taken in roots.items():
            values = [variable._value for variable in taken]
            rank_agreement.broadcast(self._transport, values, root)
        if conflict and self._transport.rank == 0 and first_time(conflict):
            logger.warning(
                "callbacks wrote different values into %s on different "
                "ranks: all ranks continue with the values of the first of "
                "these ranks.",
                conflict,
            )


for _event in set(_SYNCED_EVENTS) - set(vars(SyncedCallbacks)):
    _settled = functools.partialmethod(SyncedCallbacks._settle, _event)
    setattr(SyncedCallbacks, _event, _settled)


def _acts(callback: Any, event: str) -> bool:
    """Whether a callback may stop a loop or write weights at an event.

    Keras also calls the methods with older names; a callback that does not
    inherit from Keras's class may lack some.
    """
    names = {event, event.replace("train_batch", "batch")}
    classes = _HARMLESS if "batch" in event else _HARMLESS[:1]
    harmless = {vars(cls).get(name) for cls in classes for name in names}
    methods = [
        inspect.unwrap(getattr(callback, name))
        for name in names
        if hasattr(callback, name)
    ]
    functions = (getattr(method, "__func__", method) for method in methods)
    return hasattr(callback, event) and any(
        function not in harmless and not hasattr(function, NEVER_STOPS)
        for function in functions
    )


def _value(variable: keras.Variable) -> Any:
    held = variables_lib.copy_on_tower(variable._value)
    # The value may be on another rank only.
    return held.read_value() if hasattr(held, "read_value") else None


def _is_same(before: Any, after: Any) -> bool:
    if before is None or after is None or before.dtype == tf.string:
        return True
    if "CPU" not in before.device:
        return bool(tf.reduce_all(before == after))
    # TensorFlow writes into a new buffer while the old one is referenced.
    first, second = np.asarray(before), np.asarray(after)
    return (
        np.shares_memory(first, second) or first.tobytes() == second.tobytes()
    )


@contextlib.contextmanager
def on_one_device(arguments: dict[str, Any]) -> Iterator[None]:
    """Make ``SwapEMAWeights`` work with weights on towers in this block."""
    with contextlib.ExitStack() as stack:
        for callback in listed(arguments.get("callbacks")):
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                methods = patches.bind_to(callback, _SWAPS)
                stack.enter_context(patches.shadowed(callback, methods))
        yield


def _on_first_tower(
    callback: Any, original: Callable[[Any], None], optimizer: Any
) -> None:
    variables = list(optimizer._trainable_variables)
    with as_one_device(optimizer, variables):
        original(optimizer)
    variables_lib.copy_to_towers([*variables, *optimizer.variables])


_SWAPS: patches.Shadows = {
    "_tf_swap_variables": _on_first_tower,
    "_tf_finalize_ema_values": _on_first_tower,
}
