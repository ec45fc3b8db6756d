"""Per-tower batches: a global batch split, or one batch for each tower."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import step_errors
from keras_towers.fit.contract import TowerConfig
from keras_towers.transport import Transport, next_key

_ARGUMENTS = ("x", "y", "sample_weight")
_SPLIT = (
    "If the first steps of a call show this, or the shapes are static, as with "
    "drop_remainder=True or tf.ensure_shape, towers divide the parts that have "
    "a row for each example, and each tower gets the other parts whole."
)
EACH: str = (
    'With batches="each" all parts need a row for each example; with '
    'batches="split" every tower can get the other parts whole.'
)


class TowerBatch(NamedTuple):
    """One step's data for the K towers of this process.

    Attributes:
        pieces: the K towers' pieces of the batch; some may have no examples.
        total: the number of examples of all processes; (): not yet counted.
        start: the number of examples of the processes before this one.
    """

    pieces: tuple[Any, ...]
    total: Any = ()
    start: Any = ()

    @property
    def is_counted(self) -> bool:
        """Whether the number of examples of all processes is known."""
        return not isinstance(self.total, tuple)


def counts_of(
    batch: TowerBatch, divided: Sequence[bool] | None = None
) -> list[Any]:
    """Return the K towers' numbers of examples: ints or scalar tensors.

    Args:
        batch: the pieces.
        divided: as of ``batch_size_of``.
    """
    return [batch_size_of(piece, divided) for piece in batch.pieces]


def spec_of(batch: Any, any_size: bool = False) -> Any:
    """Return the specs of a batch.

    Args:
        batch: the batch, or a tower's piece of it.
        any_size: whether to leave its number of rows open.
    """

    def spec_of_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        spec = tf.type_spec_from_value(leaf)
        return _of_any_size(spec) if any_size and has_rows(leaf) else spec

    return tf.nest.map_structure(spec_of_leaf, batch)


def batch_size_of(structure: Any, divided: Sequence[bool] | None = None) -> Any:
    """Return the batch size. A batch without rows is one example.

    Args:
        structure: the batch.
        divided: for each leaf, whether it has a row per example; None: unknown.
    """
    leaves = zip(tf.nest.flatten(structure), divided or (), strict=False)
    leaf = next((leaf for leaf, divides in leaves if divides), None)
    if leaf is None:
        leaf = with_examples(structure)
    if leaf is None:
        return 1
    size = static_rows(leaf)
    return rows_of(leaf) if size is None else size


def _of_any_size(spec: Any) -> Any:
    """Return the spec of a tensor that may have any number of rows."""
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        of_rows: Any = spec
        return tf.RaggedTensorSpec(
            shape, spec.dtype, of_rows.ragged_rank, of_rows.row_splits_dtype
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype)


def split(
    batch: Any,
    replicas: int,
    first: int = 0,
    towers: int | None = None,
    parts: DividedParts | None = None,
) -> TowerBatch:
    """Split a global batch into pieces whose sizes differ by at most one.

    Args:
        batch: structure of dense, ragged or sparse tensors of shape
            [examples, ...]. Parts without rows, or with a different number of
            rows, go to every tower whole.
        replicas: the number of towers of all processes.
        first: the first tower to return a piece for.
        towers: number of pieces to return; None for all.
        parts: knows which of its leaves are divided.
    """
    batch = tf.nest.map_structure(
        lambda leaf: leaf if _keeps(leaf) else tf.convert_to_tensor(leaf), batch
    )
    stop = first + (replicas if towers is None else towers)
    divided = (parts or DividedParts()).divided_leaves(batch)
    size = batch_size_of(batch, divided)
    if not isinstance(size, int):
        with tf.control_dependencies(check_rows(batch, _SPLIT, divided)):
            size = tf.cast(tf.identity(size), tf.int64)
    starts = _starts(size, replicas)[first : stop + 1]
    pieces = _cut(batch, starts, divided)
    return TowerBatch(pieces, size, starts[0])


def micro_batches_of(
    batch: TowerBatch, number: int, divided: Sequence[bool]
) -> TowerBatch:
    """Cut each tower's piece into micro-batches, in tower order.

    Args:
        batch: the pieces.
        number: the number of micro-batches of each tower.
        divided: for each leaf: whether it has a row per example.
    """
    if number == 1:
        return batch
    pieces: list[Any] = []
    for piece in batch.pieces:
        size = batch_size_of(piece, divided)
        pieces += _cut(piece, _starts(size, number), divided)
    return batch._replace(pieces=tuple(pieces))


def _starts(size: Any, number: int) -> list[Any]:
    """Return the first row of each of N pieces, and the end of the last."""
    least, left = size // number, size % number
    starts: list[Any] = []
    for k in range(number + 1):
        more = min(k, left) if isinstance(left, int) else tf.minimum(left, k)
        starts.append(k * least + more)
    return starts


def _cut(
    batch: Any, starts: Sequence[Any], divided: Sequence[bool]
) -> tuple[Any, ...]:
    """Cut a batch into pieces; each gets all leaves that are not divided."""
    leaves = tf.nest.flatten(batch)
    return tuple(
        tf.nest.pack_sequence_as(
            batch,
            [
                _slice(leaf, start, end - start) if divides else leaf
                for leaf, divides in zip(leaves, divided, strict=True)
            ],
        )
        for start, end in itertools.pairwise(starts)
    )


def _keeps(leaf: Any) -> bool:
    kinds = (tf.experimental.Optional, tf.experimental.ExtensionType)
    return leaf is None or isinstance(leaf, kinds) or tf.is_tensor(leaf)


def _slice(leaf: Any, start: Any, length: Any) -> Any:
    if not has_rows(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        begin = tf.concat([[start], tf.zeros_like(shape[1:])], 0)
        size = tf.concat([[length], shape[1:]], 0)
        piece = tf.sparse.slice(leaf, begin, size)
        piece = tf.sparse.reset_shape(piece, size)
        if leaf.shape.rank is not None:
            piece.set_shape([None, *leaf.shape[1:]])
        return piece
    return leaf[start : start + length]


def rows_if(batch: Any, condition: Any) -> Any:
    """Return all rows of a batch, or no rows."""

    def rows_if_of_leaf(leaf: Any) -> Any:
        if not has_rows(leaf):
            return leaf
        rows = tf.cast(rows_of(leaf), tf.int64)
        return _slice(leaf, tf.zeros_like(rows), tf.where(condition, rows, 0))

    return tf.nest.map_structure(rows_if_of_leaf, batch)


def group(dataset: tf.data.Dataset, towers: int) -> tf.data.Dataset:
    """Group every ``towers`` consecutive batches into a ``TowerBatch``."""
    if towers == 1:
        return mapped(dataset, lambda batch: TowerBatch((batch,)))

    def pieces_of(window: Any) -> TowerBatch:
        batches = tf.data.Dataset.zip(window)
        size = batches.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1)

        def piece(k: int) -> Any:
            index = tf.where(k < size, tf.constant(k, tf.int64), 0)
            batch = batches.skip(index).take(1).get_single_element()
            return rows_if(batch, k < size)

        return TowerBatch(tuple(map(piece, range(towers))))

    return mapped(dataset.window(towers), pieces_of)


def mapped(
    dataset: tf.data.Dataset, function: Callable[[Any], Any]
) -> tf.data.Dataset:
    """Map a function over a dataset; it gets each element as one argument."""
    # TensorFlow unpacks plain tuples only, not named ones.
    if type(dataset.element_spec) is tuple:
        return dataset.map(lambda *element: function(element))
    return dataset.map(function)


def with_equal_rows(batch: Any) -> Any:
    """Fail if the parts of a batch have different numbers of rows."""
    # TensorFlow's own split would use the rows of the first part for all.
    advice = "Batches for accelerators need parts with equally many rows."
    with tf.control_dependencies(check_rows(batch, advice)):
        return identity_of(batch)


def forget_sizes(batch: Any) -> Any:
    """Erase the static batch size.

    With a static size, TensorFlow would drop the last batches if fewer than one
    per tower are left.
    """

    def forget(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
            return leaf
        shape = [None, *leaf.shape[1:]]
        return tf.compat.v1.placeholder_with_default(leaf, shape)

    return tf.nest.map_structure(forget, batch)


def is_whole(batch: Any) -> bool:
    """Whether a batch is a global batch that is not split yet."""
    return not isinstance(batch, TowerBatch) and not any(
        isinstance(leaf, compat.PerReplica) for leaf in tf.nest.flatten(batch)
    )


def as_tower_batch(
    config: TowerConfig, batch: Any, parts: DividedParts | None = None
) -> TowerBatch:
    """Convert whatever Keras passes to a step into a ``TowerBatch``."""
    towers = config.num_towers
    if is_whole(batch):
        if config.options.batches == "split":
            return split(
                batch, config.num_replicas, config.first_tower, towers, parts
            )
        return split(batch, towers, parts=parts)._replace(total=(), start=())
    is_own = config.options.batches == "each"
    if not isinstance(batch, TowerBatch):
        batch = TowerBatch(
            tuple(compat.select_replica(k, batch) for k in range(towers))
        )
        is_own = True
    if is_own and (towers > 1 or config.transport.size > 1):
        refuse_without_rows(batch.pieces[0])
    checks = [check for p in batch.pieces for check in check_rows(p, EACH)]
    with tf.control_dependencies(checks):
        return identity_of(batch)


def identity_of(structure: Any) -> Any:
    """Return a structure of identities of its tensors."""
    return tf.nest.map_structure(
        lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf,
        structure,
        expand_composites=True,
    )


def tensors_in(structure: Any) -> list[tf.Tensor]:
    """Return the tensors of a structure, with the components of ragged ones."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def as_one_batch(config: TowerConfig, batch: Any) -> Any:
    """Return the batch that one device would get."""
    if is_whole(batch):
        return batch
    pieces = as_tower_batch(config, batch).pieces

    def joined(*leaves: Any) -> Any:
        """Join the rows of the towers' tensors; take others once."""
        if not has_rows(leaves[0]):
            return leaves[0]
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(leaves))
        return tf.concat(leaves, 0)

    return tf.nest.map_structure(joined, *pieces)


def gather_batch(batch: Any, transport: Transport) -> Any:
    """Return the global batch, given this rank's part; eager only."""
    rows = static_rows(batch)

    def gather_leaf(leaf: Any) -> Any:
        if leaf is None or not is_divided(leaf, rows):
            return leaf
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

    def all_ranks(tensor: Any) -> tf.Tensor:
        return transport.all_gather(tensor, next_key("rows"))

    whole = tf.nest.map_structure(gather_leaf, batch)
    if int(batch_size_of(whole)) == 0:
        # The data of all ranks have ended.
        raise StopIteration
    return whole


class DividedParts:
    """Knows which parts of a batch have a row for each example.

    Parts whose number of rows is known only at run time are assumed to have a
    row for each example, unless an earlier batch has shown otherwise. A step in
    which they differ fails.
    """

    def __init__(self) -> None:
        self._undivided: dict[tuple[str, ...], set[str]] = {}

    def see(self, batch: Any) -> set[str]:
        """Return which parts of batches with this structure are not divided."""
        names = names_of(batch)
        examples = batch_size_of(batch)
        undivided = self._undivided.setdefault(tuple(names), set())
        for name, leaf in zip(names, tf.nest.flatten(batch), strict=True):
            if has_rows(leaf) and int(batch_size_of(leaf)) != int(examples):
                undivided.add(name)
        return undivided

    def divided_leaves(self, batch: Any) -> list[bool]:
        """Return for each leaf of a batch, or its specs, if it is divided."""
        names = names_of(batch)
        undivided = self._undivided.get(tuple(names), set())
        leaves = [
            None if name in undivided else leaf
            for name, leaf in zip(names, tf.nest.flatten(batch), strict=True)
        ]
        rows = static_rows(tf.nest.pack_sequence_as(batch, leaves))
        return [is_divided(leaf, rows) for leaf in leaves]


def check_rows(
    batch: Any, advice: str, chosen: Sequence[bool] | None = None
) -> list[Any]:
    """Return assertions that parts of a batch have equally many rows.

    Args:
        batch: the batch.
        advice: the end of the error message, which says what to do.
        chosen: for each leaf, whether to check it; None: all that have rows.
    """
    leaves_of_batch = tf.nest.flatten(batch)
    if chosen is None:
        chosen = list(map(has_rows, leaves_of_batch))
    named = zip(names_of(batch), leaves_of_batch, chosen, strict=True)
    leaves = {name: leaf for name, leaf, is_chosen in named if is_chosen}
    # Static numbers that are equal need no check at run time.
    static = {tf.TensorShape(leaf.shape)[0] for leaf in leaves.values()}
    if len(leaves) < 2 or (len(static) == 1 and None not in static):
        return []
    listed = ", ".join(f"{name} has {{}}" for name in leaves)
    # An accelerator would have to be waited for.
    with tf.device(compat.HOST):
        counts = [tf.cast(rows_of(leaf), tf.int64) for leaf in leaves.values()]
        return step_errors.assert_for_user(
            tf.reduce_all(tf.stack(counts) == counts[0]),
            f"the parts of a batch have different numbers of rows: {listed}. "
            f"{advice} A dataset of single examples needs .batch(n).",
            counts,
        )


def refuse_without_rows(batch: Any) -> None:
    """Reject a tower's own batch if a part of it cannot be divided.

    Each tower's batch has such a part, and one device could use only one.
    """
    for name, leaf in zip(names_of(batch), tf.nest.flatten(batch), strict=True):
        is_value = isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant
        if is_value and not has_rows(leaf):
            raise TowerError(f"part {name} of a batch has no rows. {EACH}")
        if has_rows(leaf) and not can_be_divided(leaf):
            raise TowerError(
                f"part {name} of a batch is ragged in several axes, and cannot "
                f"be divided. {EACH}"
            )


def with_examples(batch: Any) -> Any:
    """Return a part of a batch, or spec, whose rows are the examples, or None.

    It is a target, if an input has as many rows, and else one of the most parts
    with as many. A part that cannot be divided does not show a tower's number
    of rows, so it is returned only if there is no other part.
    """
    parts = _numbered(batch)
    if not parts:
        return next(filter(has_rows, tf.nest.flatten(batch)), None)
    if type(batch) is tuple and len(batch) > 1:
        inputs = {rows for rows, _ in _numbered(batch[0])}
        targets = [p for p in _numbered(batch[1]) if p[0] in inputs]
        parts = targets or parts
    counts = Counter(rows for rows, _ in parts)
    # Where it is a tie, a number that is always the same is a table's.
    _, leaf = max(parts, key=lambda part: (counts[part[0]], part[0] is None))
    return leaf


def _numbered(batch: Any) -> list[tuple[int | None, Any]]:
    """Return the parts that towers can divide, with static numbers of rows."""
    leaves = filter(has_rows, tf.nest.flatten(batch))
    divisible = filter(can_be_divided, leaves)
    return [(tf.TensorShape(leaf.shape)[0], leaf) for leaf in divisible]


def static_rows(batch: Any) -> int | None:
    """Return the static number of examples of a batch, or specs, or None."""
    leaf = with_examples(batch)
    return None if leaf is None else tf.TensorShape(leaf.shape)[0]


def is_divided(leaf: Any, rows: int | None) -> bool:
    """Whether a part of a batch, or its spec, has a row for each example.

    Args:
        leaf: the part.
        rows: the static number of rows of the batch.
    """
    return (
        has_rows(leaf)
        and tf.TensorShape(leaf.shape)[0] == rows
        and can_be_divided(leaf)
    )


def can_be_divided(leaf: Any) -> bool:
    """Whether towers can divide a part of a batch that has rows, or its spec.

    A tensor that is ragged in several axes is not divided.
    """
    return getattr(leaf, "ragged_rank", 1) == 1


def rows_of(leaf: Any) -> tf.Tensor:
    """Return the number of rows of a tensor of any kind."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def names_of(batch: Any) -> list[str]:
    """Name the leaves of a batch, as in ``fit(x, y)``."""
    names = []
    for path, _ in keras.tree.flatten_with_path(batch):
        first, *rest = path or (0,)
        if isinstance(batch, tuple) and len(batch) <= len(_ARGUMENTS):
            name = _ARGUMENTS[first]
        else:
            rest, name = [first, *rest] if path else [], "x"
        names.append(name + "".join(f"[{step!r}]" for step in rest))
    return names


def has_rows(leaf: Any) -> bool:
    """Whether a part of a batch, or its spec, has rows."""
    shape = getattr(leaf, "shape", None)
    return shape is not None and tf.TensorShape(shape).rank not in (0, None)
