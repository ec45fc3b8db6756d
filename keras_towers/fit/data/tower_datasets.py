"""Datasets of batches that are divided over towers before a step.

``epoch_iterator.py`` makes them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.data import same_data
from keras_towers.fit.data.batches import (
    Batch,
    TowerBatch,
    identity_of,
    rows_if,
)
from keras_towers.fit.places import Places
from keras_towers.foundation import compat
from keras_towers.foundation.notices import first_time, logger
from keras_towers.foundation.object_types import Structure
from keras_towers.partition.ir.effects import changes_state


def group(dataset: tf.data.Dataset, towers: int) -> tf.data.Dataset:
    """Group every ``towers`` consecutive batches into a ``TowerBatch``."""
    if towers == 1:
        return mapped(dataset, lambda batch: TowerBatch((batch,)))

    def pieces_of(window: Structure) -> TowerBatch:
        batches = tf.data.Dataset.zip(window)
        size = batches.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1)

        def piece(k: int) -> Structure:
            index = tf.where(k < size, tf.constant(k, tf.int64), 0)
            batch = batches.skip(index).take(1).get_single_element()
            return rows_if(batch, k < size)

        return TowerBatch(tuple(map(piece, range(towers))))

    return mapped(dataset.window(towers), pieces_of)


def mapped(
    dataset: tf.data.Dataset, function: Callable[[Structure], Structure]
) -> tf.data.Dataset:
    """Map a function over a dataset; it gets each element as one argument."""
    # TensorFlow unpacks plain tuples only, not named ones.
    if type(dataset.element_spec) is tuple:
        return dataset.map(lambda *element: function(element))
    return dataset.map(function)


def in_one_order(
    dataset: tf.data.Dataset, config: TowerConfig
) -> tf.data.Dataset:
    """Return a dataset whose random numbers do not depend on time.

    Parallel calls of a function draw in the order in which they happen to run.
    TensorFlow can make what they draw, or all functions, run in order.
    """
    parallel = [
        part
        for part in same_data.parts_of(dataset)
        if tf.get_static_value(getattr(part, "_num_parallel_calls", 1)) != 1
    ]
    graphs = [f.function.graph for p in parallel for f in p._functions()]
    draw = next(filter(None, map(changes_state, graphs)), None)
    if draw is None:
        return dataset
    is_shown = compat.traceback_utils.include_frame
    frames = [f for f in draw.traceback if is_shown(f.filename)]
    lines = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in frames]
    line = lines[-1] if lines else draw.name
    if first_time(config.strategy, line) and config.job.rank == 0:
        logger.warning(
            "a parallel map of the data draws random numbers (%s), but all "
            "ranks need the same ones. So functions of the dataset that draw "
            "or change something run one after another, and with layers of "
            "Keras all of them. If this is slow, leave num_parallel_calls out "
            "of this map only, or draw with tf.random.stateless_uniform.",
            line,
        )
    ordered = tf.raw_ops.OptimizeDatasetV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        optimizations_enabled=["make_deterministic"],
        optimizations_disabled=[],
        optimizations_default=[],
        # It takes those of the dataset.
        output_types=[tf.variant],
        output_shapes=[None],
    )
    result = tf.data.experimental.from_variant(ordered, dataset.element_spec)
    # It uses variables of the other one.
    weakref.finalize(result, id, dataset)
    return result


def with_equal_rows(batch: Structure) -> Structure:
    """Fail if the parts of a batch have different numbers of rows."""
    # TensorFlow's own split would use the rows of the first part for all.
    advice = (
        "GPUs get their rows ahead of the steps. So if a part should go whole "
        "to each tower, it needs a static shape (drop_remainder=True, "
        "tf.ensure_shape)."
    )
    checks = Batch.of(batch).check_rows(advice, undivided=True)
    with tf.control_dependencies(checks):
        return identity_of(batch)


def forget_sizes(batch: Structure) -> Structure:
    """Erase the static batch size.

    With a static size, TensorFlow would drop the last batches if there are
    fewer of them than towers.
    """
    shapes = [
        [None, *leaf.shape[1:]]
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank
        else leaf.shape
        for leaf in tf.nest.flatten(batch)
    ]
    return with_shapes(shapes, batch)


def with_shapes(shapes: Sequence[Any], batch: Structure) -> Structure:
    """Return a batch of which only these static shapes are known.

    Args:
        shapes: that of each dense tensor; None: not even its rank.
        batch: the batch.
    """
    leaves = [
        tf.compat.v1.placeholder_with_default(leaf, shape)
        if isinstance(leaf, tf.Tensor)
        else leaf
        for leaf, shape in zip(tf.nest.flatten(batch), shapes, strict=False)
    ]
    return tf.nest.pack_sequence_as(batch, leaves)


def read_local_rows(adapter: Any, places: Places) -> tf.data.Dataset | None:
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

    def examples(batch: tf.Tensor, arrays: Structure) -> TowerBatch:
        local = Batch.of(batch).split(
            places.replicas, places.first_tower, places.towers
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
