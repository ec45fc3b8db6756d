"""The rows of each rank: read from arrays, gathered, without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.data import batches as data_lib
from keras_towers.transport import Transport, next_key


def gather_batch(batch: Any, transport: Transport) -> Any:
    """Return the global batch, given this rank's part; eager only."""
    rows = data_lib.static_rows(batch)

    def gather_leaf(leaf: Any) -> Any:
        if leaf is None or not data_lib.is_divided(leaf, rows):
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
    if int(data_lib.batch_size_of(whole)) == 0:
        # The data of all ranks have ended.
        raise StopIteration
    return whole


def read_local_rows(
    adapter: Any, config: TowerConfig
) -> tf.data.Dataset | None:
    """Read only this process's examples from arrays, as ``TowerBatch``es."""
    # None if an array is sparse or ragged.
    arrays = keras.tree.lists_to_tuples(
        compat.convert_to_sliceable(
            adapter._inputs, target_backend="tensorflow"
        )
    )
    if not all(isinstance(a, tf.Tensor) for a in tf.nest.flatten(arrays)):
        return None
    numbers = compat.ArrayDataAdapter(
        np.arange(adapter._num_samples),
        batch_size=adapter._batch_size,
        shuffle=adapter._shuffle,
    ).get_tf_dataset()

    def examples(batch: tf.Tensor, arrays: Any) -> data_lib.TowerBatch:
        local = data_lib.split(
            batch,
            config.num_replicas,
            config.first_tower,
            config.num_towers,
        )
        pieces = tuple(
            tf.nest.map_structure(lambda a, p=piece: tf.gather(a, p), arrays)
            for piece in local.pieces
        )
        return local._replace(pieces=pieces)

    arrays = tf.data.Dataset.from_tensors(arrays).repeat()
    return tf.data.Dataset.zip((numbers, arrays)).map(
        examples, num_parallel_calls=tf.data.AUTOTUNE
    )


def endless(
    dataset: tf.data.Dataset, towers: int, first: Callable[[], tf.data.Dataset]
) -> tf.data.Dataset:
    """Extend a dataset endlessly by steps without examples."""
    # A rank whose data has ended must still take part in collectives.

    def without(batch: Any) -> data_lib.TowerBatch:
        rows = data_lib.rows_if(batch, tf.constant(False))
        return data_lib.TowerBatch((rows,) * towers)

    empty = data_lib.mapped(first().take(1), without).cache().repeat()
    return dataset.concatenate(empty)
