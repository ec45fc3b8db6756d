"""The names in Keras that stay replaced outside of scopes.

They run a model's methods on the towers of its strategy, and connect
``keras.distribution`` to towers. Keras's TensorFlow backend has no code behind
that; the functions that its JAX backend has are filled in where Keras itself
looks for them. Three more are wrapped: the six methods of a model, the function
by which Keras stores the distribution, and the one that decides which frames a
traceback shows.
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
from keras_towers.fit import contract
from keras_towers.fit.context import active_step, blocks, patches

_PACKAGE = os.path.dirname(keras_towers.__file__) + os.sep


logger = logging.getLogger("keras_towers")

_warned_of_threads: set[tuple[str, str]] = set()


def connect(
    around_call: Callable[[str, Any], contextlib.AbstractContextManager[None]],
    set_distribution: Callable[[Callable[[], None], Any], None],
    backend: Mapping[str, Callable[..., Any]],
) -> contextlib.ExitStack:
    """Connect ``keras.distribution`` to towers, until the stack is closed.

    Args:
        around_call: makes the block around each call of a model's method.
        set_distribution: gets the function that stores a distribution, and the
            distribution, or None.
        backend: functions that get the one of Keras that they replace, or None,
            and the arguments of a call.
    """

    def method(
        name: str,
        inner: Callable[..., Any],
        model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with around_call(name, model):
            return run_method(name, inner, model, *args, **kwargs)

    def store(inner: Callable[..., Any], name: str, value: Any) -> None:
        if name == "distribution":
            set_distribution(lambda: inner(name, value), value)
        else:
            inner(name, value)

    with contextlib.ExitStack() as undo:
        for name in contract.METHODS:
            ours = functools.partial(method, name)
            undo.callback(patches.wrap(compat.TensorFlowTrainer, name, ours))
        # Also reached by a set_distribution that was imported by its name.
        stores = compat.global_state
        undo.callback(patches.wrap(stores, "set_global_attribute", store))
        # Tracebacks show the user's lines, and Keras's are always wrapped here.
        shown = compat.traceback_utils
        undo.callback(patches.wrap(shown, "include_frame", _is_shown))
        filled_in = {
            name: functools.partial(
                ours, getattr(compat.distribution_lib, name, None)
            )
            for name, ours in backend.items()
        }
        undo.enter_context(patches.shadowed(compat.distribution_lib, filled_in))
        return undo.pop_all()


def run_method(
    kind: str,
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a method of Keras on the towers of its strategy, if it has one."""
    strategy = contract.in_force() or contract.owner_of(model)
    has_strategy = tf.distribute.has_strategy()
    in_replica = (
        has_strategy and tf.distribute.get_replica_context() is not None
    )
    if strategy is not None and not in_replica:
        call = contract.KerasCall.of(kind, original, model, args, kwargs)
        return strategy._components.calls.run(call)
    trains = kind in contract.TRAINING
    if strategy is None and trains:
        _warn_of_thread(kind, model)
    # Inside another call that runs alone, such as evaluate in a callback.
    alone = active_step.training_alone
    with alone.filled(None if alone.get() is None else trains):
        return original(model, *args, **kwargs)


def _warn_of_thread(kind: str, model: Any) -> None:
    block = blocks.elsewhere()
    if block is None or block in _warned_of_threads:
        return
    _warned_of_threads.add(block)
    logger.warning(
        "%s of model %r runs on one device: the block of %s was entered in "
        "thread %r and holds only there, but this is thread %r. Enter it in "
        "the thread that calls %s.",
        kind,
        model.name,
        *block,
        threading.current_thread().name,
        kind,
    )


def _is_shown(inner: Callable[[str], bool], filename: str) -> bool:
    return inner(filename) and not filename.startswith(_PACKAGE)


def unsharded(
    distribution: Any,
) -> contextlib.AbstractContextManager[None]:
    """Keep Keras from splitting data over processes inside a block."""
    return patches.shadowed(distribution, {"_is_multi_process": False})


def one_device() -> contextlib.AbstractContextManager[None]:
    """Hide the current strategy inside a block."""
    return compat.single_device_mode()
