"""The names in Keras that connect ``keras.distribution`` to towers.

These alone stay replaced outside of scopes. Keras's TensorFlow backend has no
code behind ``keras.distribution``; the functions that its JAX backend has are
filled in where Keras itself looks for them. Two more are wrapped: the six
methods of a model, and the function by which Keras stores the distribution.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras_towers
from keras_towers import compat
from keras_towers.fit import contract
from keras_towers.fit.context import patches

_PACKAGE = os.path.dirname(keras_towers.__file__) + os.sep


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
            return inner(model, *args, **kwargs)

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
