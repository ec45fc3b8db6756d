"""Which rows of the global batch a tower computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.splitting import marks


@dataclasses.dataclass(eq=False)
class Rows:
    """A tower's rows of the global batch during a step."""

    start: Any
    count: Any
    total: Any
    # The graph in which the step is traced; None in eager mode.
    graph: tf.Graph | None = None
    foreign: Any = None
    # The number of rows, where static shapes show it; else None.
    static: int | None = None

    def inside(self, start: Any, count: Any, total: Any) -> Rows:
        """Return the same rows in a trace that is given these numbers."""
        return Rows(
            start=start,
            count=tf.convert_to_tensor(count, tf.int64),
            total=tf.convert_to_tensor(total, tf.int64),
            graph=compat.get_default_graph(),
            static=self.static,
        )

    @property
    def first(self) -> tf.Tensor:
        """Index in the global batch of the first row the tower computes."""
        # A tower with a borrowed example may begin after the last row.
        return tf.minimum(self.start, self.total - self.count)

    def own(self, values: tf.Tensor) -> tf.Tensor:
        """Return the tower's rows of values for the global batch."""
        # Values have the shape [rows of the global batch, ...].
        places = tf.cast(self.first, tf.int64) + tf.range(self.count)
        return tf.gather(values, marks.marked(places, marks.OWN_ROWS))

    def drawn(
        self, values: tf.Tensor, axis: int, blocks: tuple[int, ...]
    ) -> tf.Tensor:
        """Mark random numbers, of which an axis has the tower's rows."""
        if self.graph is None:
            return values
        meaning = marks.drawn(axis, len(blocks), blocks[0])
        return marks.marked_along(values, meaning)

    def of_all(self, values: tf.Tensor) -> tf.Tensor:
        """Give gathered values the number of rows, if it is known."""
        total = tf.get_static_value(self.total)
        return tf.ensure_shape(values, [total, *values.shape[1:]])

    def mark(self, data: Any) -> Any:
        """Hide the number of rows of a tower's data from static shapes."""
        # Those are tensors of shape [count, ...].
        if self.graph is None:
            return data
        return tf.nest.map_structure(_marked, data)


def _marked(leaf: Any) -> Any:
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
        return leaf
    hidden = [None, *leaf.shape[1:]]
    return tf.compat.v1.placeholder_with_default(leaf, hidden)
