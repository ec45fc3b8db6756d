"""Layers that users let run again: ``keras.RematScope``, ``keras.remat``.

On TensorFlow both are ``tf.recompute_grad``, which traces a function once more
in its gradient. Draws are then other ones, what updates a variable does so
twice, keyword arguments fail, and the gradients of all its variables wait for
one another. A step that towers trace has the function once, like any other, and
the schedule computes again what has no effect.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.segments import Segments


class RematScopes:
    """Notes which operations of a trace users let be computed again."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Of functions that are being called, the outer ones first.
        self._open: tuple[int, ...] = ()
        self._paths: dict[str, tuple[int, ...]] = {}

    @contextlib.contextmanager
    def segment(self) -> Iterator[None]:
        """Let what a block adds to the current graph be computed again."""
        graph, outer = compat.get_default_graph(), self._open
        before = len(graph.get_operations())
        self._open = (*outer, next(self._numbers))
        try:
            yield
        finally:
            for operation in graph.get_operations()[before:]:
                # Inner ones have noted theirs.
                self._paths.setdefault(operation.name, self._open)
            self._open = outer

    def segments_of(self, graph: tf.Graph) -> Segments | None:
        """Return what has been noted in a graph; None: nothing."""
        if not self._paths:
            return None

        @functools.cache
        def is_of_gradient(name: str) -> bool:
            try:
                operation = graph.get_operation_by_name(name)
            except (KeyError, ValueError):
                return False
            return compat.is_of_gradient(operation)

        return Segments(self._paths, is_of_gradient)
