"""What callbacks write into variables, found out by looking at these."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.calls.callbacks import NEVER_STOPS
from keras_towers.fit.context import patches
from keras_towers.fit.weights.variables import component

# Ranks would overwrite each other's files or repeat each other's output.
CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# What these do around a batch stops no loop, and writes no weights.
_HARMLESS = (keras.callbacks.Callback, *CHIEF_ONLY)
AROUND_BATCHES: dict[str, tuple[str, str]] = {
    loop: (f"on_{loop}_batch_begin", f"on_{loop}_batch_end")
    for loop in ("train", "test", "predict")
}
EVENTS: tuple[str, ...] = (
    *(f"on_{loop}_{end}" for loop in AROUND_BATCHES for end in ("begin", "end")),
    *("on_epoch_begin", "on_epoch_end"),
    *(event for both in AROUND_BATCHES.values() for event in both),
)


def acts(callback: Any, event: str) -> bool:
    """Whether a callback may stop a loop or write variables at an event."""
    around = "_batch_" in event
    names = {event, event.replace("train_batch", "batch")}
    harmless = {
        vars(cls).get(name)
        for cls in (_HARMLESS if around else _HARMLESS[:1])
        for name in names
    }
    # A callback of no class of Keras's may lack some.
    methods = [
        inspect.unwrap(getattr(callback, name))
        for name in names
        if hasattr(callback, name)
    ]
    functions = (getattr(method, "__func__", method) for method in methods)
    return any(
        function not in harmless and not hasattr(function, NEVER_STOPS)
        for function in functions
    )


@contextlib.contextmanager
def watched(
    callbacks: Iterable[Any],
    variables: Callable[[], Sequence[keras.Variable]],
    ran: Callable[[Any, list[keras.Variable]], None],
    events: Sequence[str] = EVENTS,
) -> Iterator[None]:
    """Tell ``ran`` what each callback has written at an event, in a block."""

    def run(
        callback: Any, original: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        looked_at = variables()
        before = [_value(variable) for variable in looked_at]
        original(*args, **kwargs)
        pairs = zip(looked_at, before, strict=True)
        ran(callback, [v for v, old in pairs if not _same(old, _value(v))])

    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            mine = {
                event: run
                for event in events
                if hasattr(callback, event) and acts(callback, event)
            }
            bound = patches.bound(callback, mine)
            stack.enter_context(patches.shadowed(callback, bound))
        yield


def _value(variable: keras.Variable) -> tf.Tensor | None:
    held = component(variable._value)
    # Another rank may have it.
    if not hasattr(held, "read_value") or held.dtype == tf.string:
        return None
    return held.read_value()


def _same(before: tf.Tensor | None, after: tf.Tensor | None) -> bool:
    if before is None or after is None or before.shape != after.shape:
        return before is after
    # TensorFlow writes to another buffer while somebody holds this one.
    if "CPU" in before.device and np.shares_memory(
        np.asarray(before), np.asarray(after)
    ):
        return True
    if bool(tf.reduce_all(tf.equal(before, after))):
        return True
    # NaN equals nothing.
    return before.numpy().tobytes() == after.numpy().tobytes()
