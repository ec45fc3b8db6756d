"""The names in Keras that stay replaced outside of scopes.

They run a model's methods on the towers of its strategy, and connect
``keras.distribution`` to towers. Keras's TensorFlow backend does not implement
that; the functions that its JAX backend has are added where Keras itself looks
for them. These are replaced: the six methods of a model, the method that
resolves its ``jit_compile="auto"``, the function by which Keras stores the
distribution, and the one that decides which frames a traceback shows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

import keras_towers
from keras_towers import compat
from keras_towers._notices import first_time
from keras_towers.fit import contract
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.contract import METHODS
from keras_towers.fit.weights import adoption

_PACKAGE = os.path.dirname(keras_towers.__file__) + os.sep


logger = logging.getLogger("keras_towers")


def connect(
    around_call: Callable[[str, Any], contextlib.AbstractContextManager[None]],
    set_distribution: Callable[[Callable[[], None], Any], None],
    backend: Mapping[str, Callable[..., Any]],
) -> contextlib.ExitStack:
    """Connect ``keras.distribution`` to towers, until the stack is closed.

    Args:
        around_call: returns the context of a call of a model's method.
        set_distribution: gets the function that stores a distribution, and the
            distribution, or None.
        backend: functions by name. Each gets Keras's function that it replaces,
            or None, and the arguments of a call.
    """

    def method(
        kind: str,
        original: Callable[..., Any],
        model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with around_call(kind, model):
            return _run(kind, original, model, *args, **kwargs)

    def store(original: Callable[..., Any], name: str, value: Any) -> None:
        if name == "distribution":
            set_distribution(lambda: original(name, value), value)
        else:
            original(name, value)

    trainer = compat.TensorFlowTrainer
    replacements: list[patches.Patch] = [
        *((trainer, name, functools.partial(method, name)) for name in METHODS),
        (compat.BaseTrainer, "_resolve_auto_jit_compile", _resolve_auto),
        # A set_distribution that was imported by name calls it, too.
        (compat.global_state, "set_global_attribute", store),
        # Tracebacks show the user's lines.
        (compat.traceback_utils, "include_frame", _is_shown),
    ]
    with contextlib.ExitStack() as undo:
        undo.enter_context(patches.replaced(*replacements))
        filled_in = {
            name: functools.partial(
                ours, getattr(compat.distribution_lib, name, None)
            )
            for name, ours in backend.items()
        }
        undo.enter_context(patches.shadowed(compat.distribution_lib, filled_in))
        return undo.pop_all()


def _run(
    kind: str,
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a method of Keras on the towers of its strategy, if it has one."""
    in_block = tf.distribute.has_strategy()
    if in_block and contract.active_strategy() is None:
        # One of TensorFlow's own strategies may train an ordinary model.
        adoption.release_from_default(model)
    strategy = adoption.strategy_that_runs(model, kind)
    in_replica = in_block and tf.distribute.get_replica_context() is not None
    if strategy is not None and not in_replica:
        if not in_block:
            adoption.announce_default(model, kind, strategy._config)
        call = contract.KerasCall.of(kind, original, model, args, kwargs)
        with strategy.scope():
            return strategy._calls.run_call(call)
    trains = kind in contract.TRAINING
    if strategy is None and trains:
        _warn_of_thread(kind, model)
    # This may be a nested call, such as evaluate in a callback.
    outer = thread_state.trains_on_one_device
    with outer.holding(None if outer.get() is None else trains):
        return original(model, *args, **kwargs)


def _resolve_auto(original: Callable[[Any], bool], model: Any) -> bool:
    """Resolve ``jit_compile="auto"`` as Keras does without a strategy.

    Under a strategy of TensorFlow's own, XLA cannot compile a step; on towers
    it can.
    """
    if contract.tower_strategy_of(model) is None:
        return original(model)
    with patches.shadowed(model, {"_distribute_strategy": None}):
        return original(model)


def _warn_of_thread(kind: str, model: Any) -> None:
    block = thread_state.block_of_other_thread()
    if block is None or not first_time(("entered elsewhere", *block)):
        return
    logger.warning(
        "%s of model %r runs on one device: the block of %s was entered in "
        "thread %r and applies only there, but this is thread %r. Enter it in "
        "the thread that calls %s.",
        kind,
        model.name,
        *block,
        threading.current_thread().name,
        kind,
    )


def _is_shown(inner: Callable[[str], bool], filename: str) -> bool:
    return inner(filename) and not filename.startswith(_PACKAGE)
