"""Finding the callbacks of a call, and adapting those that need it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.callbacks import (
    ChiefOnly,
    EveryRank,
    ObservesFit,
    ResumesFit,
)
from keras_towers.fit.context import patches
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights import variables as variables_lib

logger = logging.getLogger("keras_towers")

# They look at several epochs, and forget them when training begins.
_COUNTING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
)

_Kind = TypeVar("_Kind")


def by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Bind the user's arguments of a Keras method to their names."""
    given = inspect.signature(method).bind(None, *args, **kwargs).arguments
    del given["self"]
    given.update(given.pop("kwargs", {}))
    return given


def listed(callbacks: Any) -> list[Any]:
    """Return callbacks, in any form that Keras accepts, as a flat list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return [c for c in tf.nest.flatten(callbacks) if c is not None]


def with_added(callbacks: Any, mine: keras.callbacks.Callback) -> Any:
    """Return callbacks with one of ours at the end."""
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [*listed(callbacks), mine]
    # The user's own list may be used again, without ours.
    added = copy.copy(callbacks)
    added.callbacks = [*callbacks.callbacks, mine]
    mine.set_params(added.params)
    mine.set_model(added.model)
    return added


def resuming(kind: str, given: dict[str, Any]) -> ResumesFit | None:
    """Find the callback that makes ``fit`` go on in the middle, if any."""
    found = _of_kind(ResumesFit, kind, given)
    if len(found) > 1:
        names = " and ".join(type(c).__name__ for c in found)
        raise TowerError(
            f"fit can resume from one place only, but got {names}: give one of "
            "them."
        )
    return found[0] if found else None


def _of_kind(
    wanted: type[_Kind], kind: str, given: dict[str, Any]
) -> list[_Kind]:
    """Find the callbacks of a type that a ``fit`` got."""
    if kind != "fit":
        return []
    callbacks = listed(given.get("callbacks"))
    for callback in callbacks:
        held = getattr(callback, "callback", None)
        if isinstance(callback, ChiefOnly | EveryRank) and isinstance(
            held, wanted
        ):
            raise TowerError(
                f"{type(held).__name__} knows itself which rank does what: "
                f"give it without {type(callback).__name__}."
            )
    return [c for c in callbacks if isinstance(c, wanted)]


def observing(kind: str, given: dict[str, Any]) -> ObservesFit | None:
    """Find the callback that observes a ``fit``, if any."""
    found = _of_kind(ObservesFit, kind, given)
    if len(found) > 1:
        raise TowerError(
            f"fit got {len(found)} callbacks of type "
            f"{type(found[0]).__name__}: give one."
        )
    return found[0] if found else None


@contextlib.contextmanager
def observed(
    kind: str,
    model: keras.Model,
    given: dict[str, Any],
    config: TowerConfig | None,
) -> Iterator[None]:
    """Let a callback observe the ``fit`` in this block, if one does."""
    # Without towers (``config`` is None) Keras trains as without a strategy.
    observer = observing(kind, given)
    if observer is None:
        yield
        return
    callbacks = given["callbacks"]
    others = [c for c in listed(callbacks) if c is not observer]
    ordered = [observer.first, *others, observer]
    with contextlib.ExitStack() as stack:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            stack.callback(setattr, callbacks, "callbacks", callbacks.callbacks)
            callbacks.callbacks = ordered
        else:
            given["callbacks"] = ordered
        stack.enter_context(observer.around(model, config, given["x"]))
        yield


def warn_of_counters(given: dict[str, Any]) -> None:
    """Name the callbacks that begin to count anew where ``fit`` goes on."""
    names = [
        type(callback).__name__
        for callback in listed(given.get("callbacks"))
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
def on_one_device(given: dict[str, Any]) -> Iterator[None]:
    """Make ``SwapEMAWeights`` work with weights on towers, for a block."""
    with contextlib.ExitStack() as stack:
        for callback in listed(given.get("callbacks")):
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                mine = patches.bound(callback, _SWAPS)
                stack.enter_context(patches.shadowed(callback, mine))
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
