"""How an optimizer writes a weight whose buffer the towers share.

Giving a weight to towers in host memory copies nothing: the copies hold the
same buffer. Adding to a shared buffer in place would first copy it, so the sum
goes to a new one.
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
    """What stands for ``assign_add`` and ``assign_sub`` of an optimizer.

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
