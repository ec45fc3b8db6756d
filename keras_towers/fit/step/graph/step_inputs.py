"""A batch divided over towers, and the other inputs of a program.

``fit/data/batches.py`` splits the batch into rows and micro-batches;
``global_step.py`` passes the result to the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.data import batches as data_lib, same_data
from keras_towers.fit.data.batches import Batch, TowerBatch
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.graph.placed_tensors import PlacedTensors
from keras_towers.fit.weights.shards import share_counts
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Structure
from keras_towers.partition.ir.axes import BATCH, COLUMNS, TOWERS
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    InputLayout,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
)
from keras_towers.partition.ir.program import ColumnInput, Inputs, Program
from keras_towers.partition.timeline.local_step import LocalStep
from keras_towers.transport import Transport, next_key


@dataclasses.dataclass(frozen=True, eq=False)
class DividedBatch:
    """A global batch, and how each of its tensors is divided over towers.

    Attributes:
        batch: its micro-batches, the same number for each of K towers.
        specs: the specs of the batch of one device.
        whole: the batch before micro-batching, with its start and total among
            the examples of all processes.
        fingerprint: by which ranks compare it; None: each has its own data.
    """

    batch: TowerBatch
    specs: Batch
    whole: TowerBatch
    fingerprint: same_data.Fingerprint | None = None

    @classmethod
    def of(
        cls,
        config: TowerConfig,
        places: Places,
        data: Structure,
        undivided: data_lib.WholeParts,
        order: StepOrder,
    ) -> DividedBatch:
        """Divide a batch over towers, once the previous step has ended.

        Args:
            config: the towers.
            places: where the step computes.
            data: what Keras passes to it.
            undivided: the parts that are known to have no rows.
            order: orders the steps.
        """
        ranks, fingerprint = places.ranks, None
        is_whole = data_lib.is_whole(data)
        batch, like = data_lib.as_tower_batch(config, places, data, undivided)
        batch = order.begin_step(batch, in_order=ranks.job.size > 1)
        if is_whole and shares_batches(config, ranks):
            fingerprint = same_data.Fingerprint(data)
        here = _sum_of(batch.counts(like))
        if not batch.is_counted and ranks.in_lockstep:
            batch = order.count(batch, here)
        elif not batch.is_counted:
            batch = batch._replace(total=here, start=0)
        whole = batch
        if not ranks.share_step:
            batch = batch._replace(total=here, start=0)
        specs = like.with_structure(batch.pieces[0]).specs(any_size=True)
        is_own = config.options.batches == "each" and ranks.batch.size > 1
        if is_whole and ranks.share_step and not is_own:
            # Keras passes the batch of one device to the step.
            specs = like.specs()
        return cls(batch, specs, whole, fingerprint)

    def in_micro_batches(self, number: int) -> DividedBatch:
        """Return the batch with so many micro-batches for each tower."""
        batch = self.batch.in_micro_batches(number, self.specs)
        return dataclasses.replace(self, batch=batch)

    @classmethod
    def undivided(cls, batch: Structure) -> DividedBatch:
        """Give the whole batch to the only tower of a program."""
        pieces = TowerBatch((batch,), total=0, start=0)
        whole = [False for _ in tf.nest.flatten(batch)]
        return cls(pieces, Batch(batch, (), whole), pieces)

    @property
    def spec(self) -> Structure:
        """The specs of the batch as the model gets it."""
        return self.specs.structure

    @property
    def layouts(self) -> list[InputLayout]:
        """The layouts of the N tensors: rows of examples, or undivided.

        They include the components of ragged and sparse tensors. Every tower
        gets undivided parts whole.
        """
        layouts: list[InputLayout] = []
        leaves = zip(self.specs.leaves, self.specs.divided, strict=True)
        for index, (leaf, is_divided) in enumerate(leaves):
            layouts += _layouts(leaf, f"leaf{index}", is_divided)
        return layouts

    @property
    def share(self) -> tf.Tensor:
        """This process's share of all examples."""
        here, total = self.batch.total, self.whole.total
        here, total = (tf.cast(n, tf.float64) for n in (here, total))
        return tf.math.divide_no_nan(here, total)

    def inputs_of(
        self,
        program: Program,
        captures: Sequence[tf.Tensor],
        on_towers: Mapping[int, TowerHandles],
        places: Places,
        local_step: LocalStep | None = None,
    ) -> PlacedTensors:
        """Return the values for the inputs of a program.

        Args:
            program: the program.
            captures: what its trace captures.
            on_towers: the handles of those that towers have copies or shards
                of, by their index among these.
            places: where it computes.
            local_step: the step, if it also needs inputs of the batch of all
                processes.
        """
        inputs, ranks, first = program.inputs, places.ranks, len(self.layouts)
        pieces = [data_lib.tensors_in(piece) for piece in self.batch.pieces]
        placed = PlacedTensors(places)
        parts = placed.at_places(BATCH)
        for index, layout in enumerate(self.layouts):
            tensor = inputs.of_graph[index]
            if layout == REPLICATED:
                placed.shared[tensor] = pieces[0][index]
                continue
            for here, piece in zip(parts, pieces, strict=True):
                here[tensor] = piece[index]
        # Sizes stay on the host: an accelerator would have to be waited for.
        with tf.device(compat.HOST):
            for name, tensor in inputs.sizes.items():
                index, axis = map(int, name.split("."))
                size = _same_size([p[index] for p in pieces], axis)
                placed.shared[tensor] = size
            is_first = ranks.step.rank == 0
            self._add_positions(placed, inputs, self.batch, is_first)
            if inputs.has_rows is not None:
                has_rows = placed.shared[inputs.total] > 0
                placed.shared[inputs.has_rows] = has_rows
            if local_step is not None:
                is_first = ranks.batch.rank == 0
                joint = local_step.joint_inputs
                self._add_positions(placed, joint, self.whole, is_first)
        handles = {first + index: own for index, own in on_towers.items()}
        _add_variables(placed, inputs, captures, handles)
        return placed

    def _add_positions(
        self,
        placed: PlacedTensors,
        inputs: Inputs,
        batch: TowerBatch,
        has_first: bool,
    ) -> None:
        """Add the first row of each part, and the number of all rows."""
        placed.shared[inputs.total] = tf.cast(batch.total, tf.int64)
        start = tf.cast(batch.start, tf.int64)
        counts = self.batch.counts(self.specs)
        parts = placed.at_places(BATCH)
        for k, (count, here) in enumerate(zip(counts, parts, strict=True)):
            here[inputs.start] = start
            here[inputs.is_first] = tf.constant(has_first and k == 0)
            start = start + tf.cast(count, tf.int64)


def shares_batches(config: TowerConfig, ranks: Ranks) -> bool:
    """Whether all ranks must read the same batches."""
    return ranks.in_lockstep and config.options.batches == "split"


def _sum_of(counts: Sequence[data_lib.Count]) -> data_lib.Count:
    """Return a sum of ints, or of tensors, on the host."""
    if all(isinstance(count, int) for count in counts):
        return sum(counts)
    with tf.device(compat.HOST):
        return tf.add_n([tf.cast(count, tf.int64) for count in counts])


def _same_size(parts: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    """Return the size of an axis, which must be the same in all parts."""
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


def _layouts(leaf: Structure, name: str, divided: bool) -> list[InputLayout]:
    if not divided:
        tensors = tf.nest.flatten(leaf, expand_composites=True)
        return [REPLICATED for tensor in tensors if tensor is not None]
    if isinstance(leaf, tf.RaggedTensorSpec):
        return [Sharded(0, name), RowSplits(name)]
    if isinstance(leaf, tf.SparseTensorSpec):
        sizes = tuple(leaf.shape[1:].as_list())
        return [SparseIndices(name), Sharded(0, name), SparseShape(sizes)]
    return [Sharded(0)]


# ---- variables, and shares ---------------------------------------------------


def _add_variables(
    tensors: PlacedTensors,
    inputs: Inputs,
    captures: Sequence[tf.Tensor],
    handles: Mapping[int, TowerHandles],
) -> None:
    """Add the variables that a trace captures, and the places that have them.

    Args:
        tensors: what the inputs get.
        inputs: the inputs of the program: those of the step, what it captures,
            and then those of columns.
        captures: N tensors of an outer graph.
        handles: the handles of those that towers have copies or shards of, by
            the index of the input.
    """
    last = len(inputs.of_graph) - len(inputs.of_columns)
    first = last - len(captures)
    for tensor, value in zip(
        inputs.of_graph[first:last], captures, strict=True
    ):
        tensors.shared[tensor] = capture(value)
    for index, tensor in inputs.copies.items():
        key = index if index < last else inputs.of_columns[index - last].key
        if key in handles:
            for here in tensors.at_places(tensor.axes):
                handle = handles[key].of_tower(here.tower, here.column)
                here[tensor] = capture(handle)
    with tf.device(compat.HOST):
        _add_shares(tensors, inputs)
        for tensor, own in zip(
            inputs.of_graph[last:], inputs.of_columns, strict=True
        ):
            for here in tensors.at_places(COLUMNS):
                here[tensor] = _of_column(own, here.column, handles, tensors)


def _add_shares(tensors: PlacedTensors, inputs: Inputs) -> None:
    """Add the rows of variables in shards that each tower has."""
    places = tensors.places
    towers, ranks = places.towers, places.ranks.shards
    for here in tensors.at_places(BATCH):
        is_first = here.micro_batch == 0 and places.ranks.is_first_replica
        here[inputs.is_first_micro_batch] = tf.constant(is_first)
    for size, (count, start) in inputs.shares.items():
        counts = share_counts(size, towers * ranks.size)
        for here in tensors.at_places(TOWERS):
            tower = towers * ranks.rank + here.tower
            here[count] = tf.constant(counts[tower], tf.int64)
            here[start] = tf.constant(sum(counts[:tower]), tf.int64)


def _of_column(
    own: ColumnInput,
    column: int,
    handles: Mapping[int, TowerHandles],
    tensors: PlacedTensors,
) -> tf.Tensor:
    """Return the value for an input that differs between columns."""
    match own.kind:
        case "handle":
            return capture(handles[own.key].of_tower(0, column))
        case "start":
            rows = own.key // tensors.places.columns
            return tf.constant(rows * column, tf.int64)
        case "is_first":
            return tf.constant(column == 0)


def capture(tensor: tf.Tensor) -> tf.Tensor:
    """Capture a tensor of an outer graph, or an eager one, in this graph."""
    graph: tf.Graph = compat.get_default_graph()
    with contextlib.suppress(AttributeError):
        return graph.capture(tensor)
    return tensor


def as_one_batch(
    config: TowerConfig, places: Places, batch: Structure
) -> Structure:
    """Return the batch that one device would get."""
    if data_lib.is_whole(batch):
        return batch
    pieces = data_lib.as_tower_batch(config, places, batch)[0].pieces

    def joined(*leaves: Any) -> data_lib.Leaf:
        """Join the rows of the towers' tensors; take others once."""
        if not data_lib.has_rows(leaves[0]):
            return leaves[0]
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(leaves))
        return tf.concat(leaves, 0)

    return tf.nest.map_structure(joined, *pieces)


def gather_batch(batch: Structure, transport: Transport) -> Structure:
    """Return the global batch, given this rank's part; eager only."""

    def gather_leaf(leaf: data_lib.Leaf) -> data_lib.Leaf:
        if isinstance(leaf, tf.RaggedTensor):
            lengths = [all_ranks(n) for n in leaf.nested_row_lengths()]
            ragged: Any = tf.RaggedTensor
            return ragged.from_nested_row_lengths(
                all_ranks(leaf.flat_values), lengths
            )
        if isinstance(leaf, tf.SparseTensor):
            counts = all_ranks(leaf.dense_shape[:1])
            before = tf.reduce_sum(counts[: transport.rank])
            shift = tf.one_hot(0, leaf.shape.rank, before, dtype=tf.int64)
            return tf.SparseTensor(
                all_ranks(leaf.indices + shift),
                all_ranks(leaf.values),
                [tf.reduce_sum(counts), *leaf.dense_shape[1:].numpy()],
            )
        return all_ranks(leaf)

    def all_ranks(tensor: tf.Tensor) -> tf.Tensor:
        return transport.all_gather(tensor, next_key("rows"))

    part = Batch.of(batch)
    whole = part.with_structure(part.map_divided(gather_leaf))
    if int(whole.size) == 0:
        # The data of all ranks have ended.
        raise StopIteration
    return whole.structure
