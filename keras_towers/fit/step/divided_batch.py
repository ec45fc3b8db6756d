"""A global batch as the towers of a program get it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.data.batches import Batch, TowerBatch, tensors_in
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
        batch: its micro-batches, the same number for each of K towers.
        specs: the specs of the batch of one device.
        of_all: the batch before micro-batching, with its start and total among
            the examples of all processes.
        fingerprint: by which ranks compare it; None: each has its own data.
    """

    batch: TowerBatch
    specs: Batch
    of_all: TowerBatch
    fingerprint: tf.Tensor | None = None

    @property
    def spec(self) -> Any:
        """The specs as the model gets them."""
        return self.specs.structure

    @property
    def layouts(self) -> list[InputLayout]:
        """The layouts of its N tensors: by rows of examples.

        They include the components of ragged and sparse tensors. Every tower
        gets the parts that are not divided whole.
        """
        layouts: list[InputLayout] = []
        leaves = zip(self.specs.leaves, self.specs.divided, strict=True)
        for index, (leaf, is_divided) in enumerate(leaves):
            layouts += _layouts(leaf, f"leaf{index}", is_divided)
        return layouts

    @property
    def share(self) -> tf.Tensor:
        """This process's share of all examples."""
        return share_of(self.batch.total, self.of_all.total)

    def values_of(
        self,
        inputs: Inputs,
        is_first: bool,
        local_step: LocalStep | None = None,
        is_first_of_all: bool = False,
    ) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
        """Return the inputs that towers share, and the inputs per micro-batch.

        Args:
            inputs: the inputs of the program.
            is_first: whether this is the first of the processes that compute
                the step together.
            local_step: the step, if it also needs inputs of the batch of all
                processes.
            is_first_of_all: whether this is the first of all processes.
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
        # Sizes stay on the host: an accelerator would have to be waited for.
        with tf.device(compat.HOST):
            for name, tensor in inputs.sizes.items():
                index, axis = map(int, name.split("."))
                shared[tensor] = _same_size([p[index] for p in pieces], axis)
            self._add_positions(inputs, self.batch, is_first, shared, parts)
            if inputs.has_rows is not None:
                shared[inputs.has_rows] = shared[inputs.total] > 0
            if local_step is not None:
                of_all = local_step.of_all
                self._add_positions(
                    of_all, self.of_all, is_first_of_all, shared, parts
                )
        return shared, parts

    def _add_positions(
        self,
        inputs: Inputs,
        batch: TowerBatch,
        has_first: bool,
        shared: dict[Any, Any],
        parts: Sequence[dict[Any, Any]],
    ) -> None:
        """Add where each part begins in a batch, and its total."""
        shared[inputs.total] = tf.cast(batch.total, tf.int64)
        start = tf.cast(batch.start, tf.int64)
        counts = self.batch.counts(self.specs)
        for k, (count, values) in enumerate(zip(counts, parts, strict=True)):
            values[inputs.start] = start
            values[inputs.is_first] = tf.constant(has_first and k == 0)
            start = start + tf.cast(count, tf.int64)


def _same_size(parts: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    """Return the size of an axis that all parts of a batch share."""
    sizes = tf.stack([tf.shape(p, out_type=tf.int64)[axis] for p in parts])
    check = tf.debugging.assert_equal(
        sizes,
        sizes[0],
        "the batches of towers have different sizes along an axis other than "
        "the first, so they cannot be parts of one batch: pad all of them to "
        'the same size, or use batches="split"',
    )
    with tf.control_dependencies([check]):
        return tf.identity(sizes[0])


def share_of(here: Any, total: Any) -> tf.Tensor:
    """Return the number of local examples as a fraction of the total."""
    numbers = [tf.cast(number, tf.float64) for number in (here, total)]
    return tf.math.divide_no_nan(*numbers)


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
