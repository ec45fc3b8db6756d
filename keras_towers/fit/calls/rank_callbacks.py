"""Callbacks of several ranks: who runs them, and how effects are shared."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers._notices import first_time
from keras_towers.fit.calls import callback_roles
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.calls.callback_roles import (
    NEVER_STOPS,
    ChiefOnly,
    EveryRank,
    saves_by_itself,
)
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.hooks import saving
from keras_towers.fit.weights import rank_state
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.fit.weights.adoption import Adoption, held_in_common
from keras_towers.reduction import sum_over_ranks
from keras_towers.rendezvous import check
from keras_towers.rendezvous.check import Peers
from keras_towers.transport import Transport

logger = logging.getLogger("keras_towers")

_STOPS = ("stop_training", "stop_evaluating", "stop_predicting")
# The older ones are part of the newer.
_EVENTS = [e for e in callback_roles.EVENTS if not e.startswith("on_batch")]
# Ranks would overwrite each other's files or repeat each other's output.
_CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# What these do around a batch stops no loop, and writes no weights.
_HARMLESS = (keras.callbacks.Callback, *_CHIEF_ONLY)


@contextlib.contextmanager
def adapted(
    config: TowerConfig, adoption: Adoption, call: TowerCall, nested: bool
) -> Iterator[None]:
    """Keep only this rank's callbacks, and share their effects."""
    arguments = call.keras_call.arguments
    # A nested call may be the validation of another one.
    if call.kind.endswith("_on_batch"):
        yield
        return
    callbacks = arguments.get("callbacks")
    # A progress bar is on rank 0 only.
    if config.peers.rank > 0:
        arguments["verbose"] = 0
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = _of_this_rank(config.peers, callbacks)
    arguments["callbacks"] = callbacks
    listed = callback_roles.listed(callbacks)
    others = [c for c in listed if not isinstance(c, SyncedCallbacks)]
    watching: Any = contextlib.nullcontext()
    # The validation of fit has its callbacks.
    if nested and len(others) < len(listed):
        call.agree = next(c for c in listed if c not in others).agree
    elif config.transport.size > 1:
        synced = SyncedCallbacks(
            config.transport, others, held_in_common, adoption
        )
        arguments["callbacks"] = callback_roles.with_added(callbacks, synced)
        call.agree, watching = synced.agree, synced.watching()
    with watching:
        yield


def _of_this_rank(peers: Peers, callbacks: Any) -> list[Any]:
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [] if callbacks is None else [callbacks]
    callbacks_here = []
    for callback in callbacks:
        chief_only = isinstance(callback, (*_CHIEF_ONLY, ChiefOnly))
        saves_alone = saving.is_once() and (
            chief_only or isinstance(callback, EveryRank)
        )
        if isinstance(callback, (ChiefOnly, EveryRank)):
            callback = callback.callback
        if peers.rank == 0 or not chief_only:
            callbacks_here.append(
                saves_by_itself(callback) if saves_alone else callback
            )
    return callbacks_here


class SyncedCallbacks(keras.callbacks.Callback):
    """Propagates the effects of callbacks to all ranks. Collective."""

    # It runs after all others: one on any rank may have written weights, or
    # stopped the loop. A rank that left the loop by itself would be waited for
    # in the next step. The ranks agree at an event only if one of them has a
    # callback that does something there.

    def __init__(
        self,
        transport: Transport,
        callbacks: list[Any],
        variables: Callable[[keras.Model], list[keras.Variable]],
        adoption: Adoption | None = None,
    ):
        super().__init__()
        self._transport = transport
        self._callbacks = callbacks
        self._variables = variables
        self._adoption = adoption
        # Those that callbacks have written, and who was the last.
        self._written: IdentityDict[keras.Variable, str] = IdentityDict()
        acting = [e for e in _EVENTS if any(_acts(c, e) for c in callbacks)]
        if adoption is None:
            # Ranks validate by themselves, or only some of them do.
            acting = [re.sub("on_test.*", "on_epoch_end", e) for e in acting]
        ranks = check.gather(transport, acting, "begins to run callbacks")
        self._events: set[str] = set(itertools.chain(*ranks))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what callbacks write in this block."""
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                run = {e: self._run for e in _EVENTS if _acts(callback, e)}
                bound = patches.bound(callback, run)
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
        # Rank 0 may have restored its place in the epochs.
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
        """Give all ranks what any of them has written."""
        variables = self._variables(self.model)
        written = {
            str(place): (_digest(variable), self._written[variable])
            for place, variable in enumerate(variables)
            if variable in self._written
        }
        self._written.clear()
        ranks = check.gather(
            self._transport, written, "takes over what callbacks wrote"
        )
        apart = self._adoption is not None and self._adoption.ranks_train_apart
        roots: dict[int, list[keras.Variable]] = {}
        conflict = ""
        for place in dict.fromkeys(itertools.chain(*ranks)):
            by_rank = {
                r: own[place] for r, own in enumerate(ranks) if place in own
            }
            differ = len({digest for digest, _ in by_rank.values()}) > 1
            if len(by_rank) == len(ranks) and (apart or not differ):
                continue
            variable = variables[int(place)]
            roots.setdefault(min(by_rank), []).append(variable)
            if differ:
                who = (f"rank {r}: {name}" for r, (_, name) in by_rank.items())
                conflict = f"{variable.path} ({', '.join(who)})"
        if roots and self._adoption is not None:
            self._adoption.update.gather_slots()
        for root, theirs in roots.items():
            values = [variable._value for variable in theirs]
            rank_state.broadcast(self._transport, values, root)
        if conflict and self._transport.rank == 0 and first_time(conflict):
            logger.warning(
                "callbacks wrote different values into %s on different "
                "ranks: all ranks continue with the values of the first of "
                "them.",
                conflict,
            )


for _event in set(_EVENTS) - set(vars(SyncedCallbacks)):
    _settled = functools.partialmethod(SyncedCallbacks._settle, _event)
    setattr(SyncedCallbacks, _event, _settled)


def _acts(callback: Any, event: str) -> bool:
    """Whether a callback may stop a loop or write weights at an event.

    Keras runs methods of older names there, too; a callback of no class of
    Keras's may lack some.
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
    held = variables_lib.component(variable._value)
    # Another rank may have it.
    return held.read_value() if hasattr(held, "read_value") else None


def _digest(variable: keras.Variable) -> str:
    value = variable._value.numpy()
    return hashlib.sha256(value.tobytes()).hexdigest()[:16]


def _is_same(before: Any, after: Any) -> bool:
    if before is None or after is None or before.dtype == tf.string:
        return True
    if "CPU" not in before.device:
        return bool(tf.reduce_all(before == after))
    # TensorFlow writes to another buffer while somebody holds this one.
    first, second = np.asarray(before), np.asarray(after)
    return (
        np.shares_memory(first, second) or first.tobytes() == second.tobytes()
    )
