"""Keys of collectives, the same on all ranks."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import tensorflow as tf

from keras_towers import compat

_used: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = (
    weakref.WeakKeyDictionary()
)


def next_key(purpose: str) -> str:
    """Return a key for the next collective of the function being traced.

    Numbering restarts in every traced function, so that a rank that retraces
    one, for another batch shape, uses the same keys as the other ranks. Eager
    collectives block until they are done, so they need no number.
    """
    if tf.executing_eagerly():
        return f"kt.{purpose}.eager"
    # Functions inside the outermost graph may run concurrently.
    graph: Any = compat.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    while getattr(outer, "building_function", False):
        graph, outer = outer, getattr(outer, "outer_graph", None)
    counter = _used.setdefault(graph, collections.Counter())
    counter[purpose] += 1
    return f"kt.{purpose}.{counter[purpose]}"
