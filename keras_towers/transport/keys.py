"""Keys of collectives: the same on all ranks, never twice in flight."""

from __future__ import annotations

import collections
import weakref

import tensorflow as tf

from keras_towers import compat

_used: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = (
    weakref.WeakKeyDictionary()
)


def next_key(purpose: str) -> str:
    """A key for the next collective of the function that is being traced.

    Collectives are numbered anew in every traced function: a rank that traces
    one a second time, for another batch shape, goes on using the keys of the
    others. Eager collectives wait for their result, so they need no number.

    Args:
        purpose: what the collective is for; one word.

    Example:
        >>> next_key("gradients")
        'kt.gradients.eager'
    """
    if tf.executing_eagerly():
        return f"kt.{purpose}.eager"
    counter = _used.setdefault(_traced_function(), collections.Counter())
    counter[purpose] += 1
    return f"kt.{purpose}.{counter[purpose]}"


def _traced_function() -> tf.Graph:
    """The outermost graph: functions inside it may run at the same time."""
    graph = compat.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    while getattr(outer, "building_function", False):
        graph, outer = outer, getattr(outer, "outer_graph", None)
    return graph
