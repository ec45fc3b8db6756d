"""Writing weights whose buffers the towers share.

Copies of a weight on towers in host memory share one buffer. Adding to a shared
buffer in place would copy it first, so the sum is written to a new buffer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context.patches import Shadows


def shadows(shared: Collection[int]) -> Shadows:
    """Return replacements for an optimizer's assign_add and assign_sub.

    Args:
        shared: ids of the ``tf.Variable``s whose buffers are shared.
    """
    return {
        "assign_add": functools.partial(_write, shared, operator.add),
        "assign_sub": functools.partial(_write, shared, operator.sub),
    }


def _write(
    shared: Collection[int],
    change: Callable[[Any, Any], Any],
    optimizer: Any,
    original: Callable[..., None],
    variable: Any,
    value: Any,
) -> None:
    native = (
        variable.value if isinstance(variable, keras.Variable) else variable
    )
    if id(native) not in shared or isinstance(value, tf.IndexedSlices):
        original(variable, value)
        return
    value = tf.cast(value, native.dtype)
    native.assign(change(native, value), read_value=False)
