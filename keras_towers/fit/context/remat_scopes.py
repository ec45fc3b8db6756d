"""Which operations of a trace users ask to compute again, as in a RematScope.

``recomputed_calls.py`` marks the operations of each such call. The schedule of
the step computes them again in the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.timeline.segments import Segments


class RematScopes:
    """The operations of a trace that users ask to compute again."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # The functions that are being called, the outer ones first.
        self._open: tuple[int, ...] = ()
        self._paths: dict[str, tuple[int, ...]] = {}

    @contextlib.contextmanager
    def segment(self) -> Iterator[None]:
        """Mark what this block adds to the graph as to be computed again."""
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
        """Return the marked segments of a graph; None if there are none."""
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
