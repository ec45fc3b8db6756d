"""Per-tower batches: a global batch split, or one batch for each tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.data.rows import RowCheck, has_rows

_PREFETCHED_BATCHES = 2


class TowerBatch(NamedTuple):
    """One step's data for the K towers of this process."""

    pieces: tuple[Any, ...]
    # Number of examples of each piece, 0 for a borrowed one, int64 of shape
    # [K]; an empty tuple if no piece is borrowed.
    counts: Any = ()
    total: Any = ()
    start: Any = ()
    # What ``counts`` is for all towers of all processes, for a batch that is
    # split: R ints or a tensor of shape [R].
    parts: Any = ()


def batch_size_of(structure: Any) -> Any:
    """Return the batch size: the rows of the first leaf that has rows."""
    size = static_size(structure)
    leaf = _leaf_with_rows(structure)
    return _rows(leaf) if size is None and leaf is not None else size


def static_size(structure: Any) -> int | None:
    """Return the static batch size of a batch or spec, or None."""
    leaf = _leaf_with_rows(structure)
    return None if leaf is None else _static_rows(leaf)


def of_any_size(spec: Any) -> Any:
    """Return the spec of a tensor that may have any number of rows."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _static_rows(leaf: Any) -> int | None:
    return tf.TensorShape(leaf.shape)[0]


def _leaf_with_rows(structure: Any) -> Any:
    return next(filter(has_rows, tf.nest.flatten(structure)), None)


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def split(
    batch: Any,
    replicas: int,
    first: int = 0,
    towers: int | None = None,
    check: RowCheck | None = None,
) -> TowerBatch:
    """Split a global batch into pieces whose sizes differ by at most one.

    Args:
        batch: structure of dense, ragged or sparse tensors of shape
            [examples, ...]; scalars go to every tower.
        towers: number of pieces to return; None for all.
    """
    batch = tf.nest.map_structure(
        lambda leaf: leaf if _keeps(leaf) else tf.convert_to_tensor(leaf), batch
    )
    mine = range(first, first + (replicas if towers is None else towers))
    leaves = [leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)]
    known = [_static_rows(leaf) for leaf in leaves]
    rows: list[Any] = known
    if None in known:
        rows = [_rows(leaf) for leaf in leaves]
    size = rows[0] if rows else None
    units: Any = size
    alike = True
    if len(leaves) > 1 and (None in known or len(set(known)) > 1):
        check, alike = check or RowCheck(), False
        units = check.units(batch, rows, replicas)
    each = {id(leaf): row for leaf, row in zip(leaves, rows, strict=True)}
    if isinstance(units, int) and units >= replicas:
        counts: Any = [
            units // replicas + (k < units % replicas) for k in range(replicas)
        ]
        starts = [sum(counts[:k]) for k in range(replicas)]
        start = starts[first] if alike else starts[first] * (rows[0] // units)
        lengths, where = counts, ((), size, start, counts)
    else:
        whole = tf.cast(1 if units is None else units, tf.int64)
        index = tf.range(replicas, dtype=tf.int64)
        left = tf.math.floormod(whole, replicas)
        counts = whole // replicas + tf.cast(index < left, tf.int64)
        before = tf.cumsum(counts, exclusive=True)
        starts = tf.where(counts > 0, before, 0)
        starts = tf.unstack(starts, num=replicas)
        lengths = tf.unstack(tf.maximum(counts, 1), num=replicas)
        mine_of = counts[mine.start : mine.stop]
        where = (mine_of, whole, before[first], counts)

    def piece(leaf: Any, k: int) -> Any:
        row = each.get(id(leaf))
        if row is None or alike:
            return _slice(leaf, starts[k], lengths[k])
        # A batch may have no rows.
        some = tf.cast(1 if units is None else units, tf.int64)
        times = row // tf.maximum(some, 1)
        return _slice(leaf, starts[k] * times, lengths[k] * times)

    pieces = tuple(
        tf.nest.map_structure(lambda leaf, k=k: piece(leaf, k), batch)
        for k in mine
    )
    return TowerBatch(pieces, *where)


def _keeps(leaf: Any) -> bool:
    return leaf is None or isinstance(
        leaf,
        (
            tf.Tensor,
            tf.RaggedTensor,
            tf.SparseTensor,
            tf.experimental.Optional,
        ),
    )


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


def first_rows(leaf: Any, count: Any) -> Any:
    """Return the first ``count`` rows of a tensor of any kind."""
    return _slice(leaf, tf.zeros_like(count), count)


def few_rows(batch: Any, count: int) -> Any:
    """Return up to ``count`` examples of a batch, with all of their rows."""
    every = tf.cast(batch_size_of(batch), tf.int64)
    few = tf.minimum(every, count)

    def rows_of(leaf: Any) -> Any:
        if not has_rows(leaf):
            return leaf
        times = tf.cast(_rows(leaf), tf.int64) // tf.maximum(every, 1)
        return first_rows(leaf, few * times)

    return tf.nest.map_structure(rows_of, batch)


def rows_if(leaf: Any, condition: Any) -> Any:
    """Return all rows of a tensor of any kind, or none of them."""
    if not has_rows(leaf):
        return leaf
    return first_rows(
        leaf, tf.where(condition, tf.cast(_rows(leaf), "int64"), 0)
    )


def concatenate(pieces: Any) -> Any:
    """Concatenate tensors of the towers in order, or stack scalars."""
    if isinstance(pieces[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(pieces))
    if not has_rows(pieces[0]):
        return tf.stack(pieces)
    return tf.concat(pieces, 0)


def group(dataset: tf.data.Dataset, towers: int) -> tf.data.Dataset:
    """Group every ``towers`` consecutive batches into a ``TowerBatch``."""
    spec = dataset.element_spec
    if towers == 1:
        return dataset.map(_one_piece)

    @tf.autograph.experimental.do_not_convert
    def pieces_of(*window) -> TowerBatch:
        window = window[0] if not isinstance(spec, tuple) else window
        batches = tf.data.Dataset.zip(window)
        size = batches.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1)

        def piece(k):
            place = tf.where(k < size, tf.constant(k, tf.int64), 0)
            return batches.skip(place).take(1).get_single_element()

        pieces = tuple(piece(k) for k in range(towers))
        counts = tf.stack(
            [
                tf.cast(batch_size_of(pieces[k]), tf.int64)
                * tf.cast(k < size, tf.int64)
                for k in range(towers)
            ]
        )
        return TowerBatch(pieces, counts)

    return dataset.window(towers).map(pieces_of)


@tf.autograph.experimental.do_not_convert
def _one_piece(*batch: Any) -> TowerBatch:
    batch = batch[0] if len(batch) == 1 else batch
    count = tf.cast(batch_size_of(batch), tf.int64)
    return TowerBatch((batch,), count[tf.newaxis])


def distribute(
    config: TowerConfig,
    dataset: tf.data.Dataset,
    each: bool,
    to_one_end: Callable[[tf.data.Dataset], tf.data.Dataset],
    whole: bool = False,
) -> Any:
    """Prefetch a dataset of batches for the towers."""
    if whole:
        return dataset.prefetch(max(_PREFETCHED_BATCHES, config.num_towers))
    if config.prefetches_to_towers:
        if not each:
            return config.strategy.experimental_distribute_dataset(
                dataset.map(_with_equal_rows)
            )
        dataset = dataset.map(_forget_sizes)
        return config.strategy.distribute_datasets_from_function(
            lambda _: dataset
        )
    if each:
        dataset = to_one_end(group(dataset, config.num_towers))
    return dataset.prefetch(_PREFETCHED_BATCHES)


@tf.autograph.experimental.do_not_convert
def _with_equal_rows(*batch: Any) -> Any:
    """Fail if the parts of a batch have different numbers of rows."""
    # TensorFlow's own split would cut them all by the first.
    rows = [_rows(leaf) for leaf in tf.nest.flatten(batch) if has_rows(leaf)]
    checks = [
        tf.debugging.assert_equal(
            count,
            rows[0],
            "all parts of a batch must have the same number of rows to be "
            "split over accelerators",
        )
        for count in rows[1:]
    ]
    with tf.control_dependencies(checks):
        batch = tf.nest.map_structure(
            tf.identity, batch, expand_composites=True
        )
    return batch[0] if len(batch) == 1 else batch


@tf.autograph.experimental.do_not_convert
def _forget_sizes(*batch: Any) -> Any:
    """Erase the static batch size."""
    # With it, TensorFlow would drop the last batches if there are too few for
    # all towers.

    def forget(leaf):
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
            return leaf
        shape = [None, *leaf.shape[1:]]
        return tf.compat.v1.placeholder_with_default(leaf, shape)

    batch = tf.nest.map_structure(forget, batch)
    return batch[0] if len(batch) == 1 else batch


def is_whole(batch: Any) -> bool:
    """Whether it is a batch for all towers, which has not been split."""
    return not isinstance(batch, TowerBatch) and not any(
        isinstance(leaf, compat.PerReplica) for leaf in tf.nest.flatten(batch)
    )


def as_tower_batch(
    config: TowerConfig, batch: Any, check: RowCheck
) -> TowerBatch:
    """Convert whatever Keras passes to a step into a ``TowerBatch``."""
    if isinstance(batch, TowerBatch):
        return batch
    towers = config.num_towers
    if is_whole(batch):
        if config.batches == "split":
            return split(
                batch, config.num_replicas, config.first_tower, towers, check
            )
        return split(batch, towers, check=check)._replace(total=(), start=())
    pieces = [compat.select_replica(index, batch) for index in range(towers)]
    sizes = [static_size(piece) for piece in pieces]
    if all(sizes):
        return TowerBatch(tuple(pieces), parts=sizes)
    counts = [tf.cast(batch_size_of(piece), tf.int64) for piece in pieces]
    return TowerBatch(
        tuple(
            tf.nest.map_structure(
                lambda own, first, n=count: _or_borrow(own, first, n),
                piece,
                pieces[0],
            )
            for piece, count in zip(pieces, counts, strict=True)
        ),
        tf.stack(counts),
        parts=tf.stack(counts),
    )


def _or_borrow(own: Any, first: Any, count: tf.Tensor) -> Any:
    if own is first or not has_rows(own):
        return own
    return tf.cond(count > 0, lambda: own, lambda: _slice(first, 0, 1))
