"""The inputs of a program: each tower's rows of a batch, and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.data.batches import TowerBatch, counts_of, tensors_in
from keras_towers.partition.layouts import (
    REPLICATED,
    InputLayout,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
)
from keras_towers.partition.local_step import LocalStep
from keras_towers.partition.program import Inputs


@dataclasses.dataclass(frozen=True, eq=False)
class DividedBatch:
    """A global batch, and how each of its tensors is divided over towers.

    Attributes:
        batch: its parts, equally many for each of K towers.
        whole: the specs of the batch of one device.
        layouts: those of its N tensors, with the parts of ragged and sparse
            ones.
        of_all: the same parts, among the examples of all processes.
    """

    batch: TowerBatch
    whole: Any
    layouts: Sequence[InputLayout]
    of_all: TowerBatch

    @property
    def share(self) -> tf.Tensor:
        """This process's share of all examples."""
        return share_of(self.batch.total, self.of_all.total)

    def values_of(
        self, inputs: Inputs, has_first: bool
    ) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
        """Return the inputs that all towers share, and the inputs of each part.

        Args:
            inputs: the program's.
            has_first: whether tower 0 is in this process.
        """
        pieces = [tensors_in(piece) for piece in self.batch.pieces]
        shared: dict[Any, Any] = {}
        parts: list[dict[Any, Any]] = [{} for _ in pieces]
        for index, layout in enumerate(self.layouts):
            tensor = inputs.of_graph[index]
            if layout == REPLICATED:
                shared[tensor] = pieces[0][index]
                continue
            for values, piece in zip(parts, pieces, strict=True):
                values[tensor] = piece[index]
        for name, tensor in inputs.sizes.items():
            index, axis = map(int, name.split("."))
            shared[tensor] = _same_size([p[index] for p in pieces], axis)
        shared[inputs.total] = tf.cast(self.batch.total, tf.int64)
        start = tf.cast(self.batch.start, tf.int64)
        counts = counts_of(self.batch)
        for k, (values, count) in enumerate(zip(parts, counts, strict=True)):
            values[inputs.start] = start
            values[inputs.is_first] = tf.constant(has_first and k == 0)
            start = start + tf.cast(count, tf.int64)
        return shared, parts

    def add_whole_batch(
        self,
        own_rows: LocalStep,
        shared: dict[Any, Any],
        parts: Sequence[dict[Any, Any]],
        has_first: bool,
    ) -> None:
        """Add the inputs that a program of own rows needs of the whole batch.

        Args:
            own_rows: the program.
            shared: the inputs that all towers share.
            parts: the inputs of each part.
            has_first: whether this is the first of all processes.
        """
        here = tf.cast(self.batch.total, tf.int64)
        shared[own_rows.total] = tf.cast(self.of_all.total, tf.int64)
        shared[own_rows.has_rows] = here > 0
        before = tf.cast(self.of_all.start, tf.int64)
        inputs = own_rows.program.inputs
        for k, values in enumerate(parts):
            values[own_rows.start] = values[inputs.start] + before
            values[own_rows.is_first] = tf.constant(has_first and k == 0)


def _same_size(parts: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    """Return the size of an axis that all parts of a batch share."""
    sizes = tf.stack([tf.shape(p, out_type=tf.int64)[axis] for p in parts])
    check = tf.debugging.assert_equal(
        sizes,
        sizes[0],
        "the batches of towers have different sizes along an axis other than "
        "the first, so that they are no parts of one batch: pad all to the "
        'same size, or use batches="split"',
    )
    with tf.control_dependencies([check]):
        return tf.identity(sizes[0])


def share_of(here: Any, total: Any) -> tf.Tensor:
    """Return the fraction of a batch that some examples are."""
    numbers = [tf.cast(number, tf.float32) for number in (here, total)]
    return tf.math.divide_no_nan(*numbers)


def layouts_of(batch: Any, divided: Sequence[bool]) -> list[InputLayout]:
    """Return how a batch is divided: by rows of examples.

    Args:
        batch: its specs.
        divided: for each of its leaves: whether it has rows of examples; all
            towers get the others as a whole.
    """
    layouts: list[InputLayout] = []
    leaves = zip(tf.nest.flatten(batch), divided, strict=True)
    for place, (leaf, has_rows) in enumerate(leaves):
        layouts += _layouts(leaf, f"leaf{place}", has_rows)
    return layouts


def _layouts(leaf: Any, name: str, divided: bool) -> list[InputLayout]:
    if not divided:
        tensors = tf.nest.flatten(leaf, expand_composites=True)
        return [REPLICATED for tensor in tensors if tensor is not None]
    if isinstance(leaf, tf.RaggedTensorSpec):
        return [Sharded(0, name), RowSplits(name)]
    if isinstance(leaf, tf.SparseTensorSpec):
        sizes = tuple(leaf.shape[1:].as_list())
        return [SparseIndices(name), Sharded(0, name), SparseShape(sizes)]
    return [Sharded(0)]
