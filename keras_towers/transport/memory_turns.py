"""Lets the exchanges of a graph share memory, one after another."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.transport import next_key

# The collection of a graph for the turns in it.
_TURNS = "keras_towers_turns"


@dataclasses.dataclass
class _InGraph:
    """The exchanges of a graph so far.

    Attributes:
        name: of the graph, among those of the outermost one.
        counts: how many there are of each kind.
        ends: by memory, what the last exchange that uses it returns.
    """

    name: str
    counts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    ends: dict[str, Sequence[tf.Tensor]] = dataclasses.field(
        default_factory=dict
    )


class Turns:
    """Lets exchanges share memory, each after the one before it has ended.

    TensorFlow begins an exchange as soon as it has its inputs, so exchanges
    that do not wait for one another each need memory of their own. Ranks trace
    the same exchanges in the same order, and so agree on who follows whom.
    Functions inside the outermost graph may run concurrently: each has memory
    of its own. Outermost graphs do not, and share theirs.

    Args:
        number: how many exchanges of a kind and graph may run at a time.
    """

    def __init__(self, number: int):
        self._number = number

    def take(
        self, exchange: Callable[[str], Sequence[tf.Tensor]], kind: str = ""
    ) -> list[tf.Tensor]:
        """Add an exchange to the graph that begins once its memory is free.

        Args:
            exchange: gets the name of the memory, the same on all ranks, and
                returns tensors that exist once it has ended.
            kind: of exchanges that share memory.
        """
        if tf.executing_eagerly():
            return [*exchange(f"eager.{kind}")]
        graph = self._in_graph()
        name = f"{graph.name}.{kind}.{graph.counts[kind] % self._number}"
        graph.counts[kind] += 1
        with tf.control_dependencies(graph.ends.get(name, ())):
            results = [*exchange(name)]
        graph.ends[name] = results
        return results

    def _in_graph(self) -> _InGraph:
        graph: Any = compat.get_default_graph()
        known = graph.get_collection_ref(_TURNS)
        # A function begins with a copy of the collection of the graph outside.
        for owner, of_graph, turns in known:
            if owner is self and of_graph is graph:
                return turns
        known.append((self, graph, _InGraph(next_key("turns"))))
        return known[-1][-1]
