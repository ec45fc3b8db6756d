"""Which rows of the global batch a tower computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.splitting import marks

NO_DIMENSION = -1


@dataclasses.dataclass(eq=False)
class Rows:
    """A tower's rows of the global batch during a step.

    Attributes:
        graph: the graph in which the step is traced; None in eager mode.
        static: the number of rows, where static shapes show it; else None.
    """

    start: Any
    count: Any
    total: Any
    graph: tf.Graph | None = None
    known: dict[Any, tuple[int, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    explained: dict[Any, Any] = dataclasses.field(default_factory=dict)
    foreign: Any = None
    static: int | None = None

    def note_common(self, values: Any) -> None:
        """Record values that are the same on all towers."""
        if self.graph is None:
            return
        for leaf in tf.nest.flatten(values):
            if isinstance(leaf, tf.Tensor):
                self.known[leaf.ref()] = NO_DIMENSION, ()

    def inside(self, start: Any, count: Any, total: Any, data: Any) -> Rows:
        """Return the same rows in the trace of a function of them.

        Args:
            start: ``start`` in the trace.
            count: ``count`` in the trace, or a number.
            total: ``total`` in the trace, or a number.
            data: the tower's data in the trace, of shape [count, ...].
        """
        return Rows(
            start=start,
            count=tf.convert_to_tensor(count, tf.int64),
            total=tf.convert_to_tensor(total, tf.int64),
            graph=compat.get_default_graph(),
            known={
                leaf.ref(): (0, (1,))
                for leaf in tf.nest.flatten(data)
                if isinstance(leaf, tf.Tensor) and leaf.shape.rank
            },
            static=self.static,
        )

    @property
    def first(self) -> tf.Tensor:
        """Index in the global batch of the first row the tower computes."""
        # A tower with a borrowed example may begin after the last row.
        return tf.minimum(self.start, self.total - self.count)

    def own(self, values: tf.Tensor) -> tf.Tensor:
        """Return the tower's rows of values for the global batch.

        Args:
            values: a tensor of shape [rows of the global batch, ...].
        """
        places = tf.cast(self.first, tf.int64) + tf.range(self.count)
        own = tf.gather(values, marks.marked(places, marks.OWN_ROWS))
        if self.graph is not None:
            self.known[own.ref()] = 0, (1,)
        return own

    def drawn(
        self, values: tf.Tensor, axis: int, blocks: tuple[int, ...]
    ) -> tf.Tensor:
        """Note random numbers, of which an axis has the tower's rows."""
        if self.graph is None:
            return values
        if len(set(blocks)) == 1:
            meaning = marks.drawn(axis, len(blocks), blocks[0])
            values = marks.marked_along(values, meaning)
        self.known[values.ref()] = axis, blocks
        return values

    def of_all(self, values: tf.Tensor) -> tf.Tensor:
        """Give gathered values the number of rows, if it is known."""
        total = tf.get_static_value(self.total)
        return tf.ensure_shape(values, [total, *values.shape[1:]])

    def mark(self, data: Any) -> Any:
        """Hide the number of rows of a tower's data from static shapes.

        Args:
            data: a structure of tensors; those of shape [count, ...] are
                replaced.
        """
        if self.graph is None:
            return data
        return tf.nest.map_structure(self._marked, data)

    def _marked(self, leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
            return leaf
        leaf = tf.compat.v1.placeholder_with_default(
            leaf, [None, *leaf.shape[1:]]
        )
        self.known[leaf.ref()] = 0, (1,)
        return leaf
