"""How an optimizer writes a weight whose buffer the towers share.

Handing a weight out to towers in host memory copies nothing: the copies hold
the same buffer. Adding to a shared buffer in place would first copy it, so the
sum goes to a new one. (5 % of a step with 8.4 million parameters on 4 towers.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def assign_add(
    original: Callable, optimizer: Any, variable: Any, value: Any
) -> None:
    """``Optimizer.assign_add`` for a weight whose buffer may be shared."""
    if not _write(variable, value, operator.add):
        original(optimizer, variable, value)


def assign_sub(
    original: Callable, optimizer: Any, variable: Any, value: Any
) -> None:
    """``Optimizer.assign_sub``, as ``assign_add``."""
    if not _write(variable, value, operator.sub):
        original(optimizer, variable, value)


def _write(variable: Any, value: Any, change: Callable) -> bool:
    if isinstance(variable, keras.Variable):
        variable = variable.value
    if isinstance(value, tf.IndexedSlices) or not _is_handed_out(variable):
        return False
    value = tf.cast(value, variable.dtype)
    variable.assign(change(variable, value), read_value=False)
    return True


def _is_handed_out(variable: Any) -> bool:
    handle = getattr(variable, "handle", None)
    container = getattr(handle, "_distributed_container", None)
    owner = container() if container is not None else None
    strategy = getattr(owner, "distribute_strategy", None)
    return getattr(strategy, "updates", None) == "once"
