"""TensorFlow's side of a strategy, for reductions and data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.data import batches as data_lib
from keras_towers.transport import Transport


@contextlib.contextmanager
def _not_repeated() -> Iterator[None]:
    """Drop what TensorFlow logs in a notebook: devices, and errors twice."""

    def is_news(record: logging.LogRecord) -> bool:
        known = record.module in ("coordinator", "mirrored_strategy")
        return record.levelno > logging.INFO or not known

    logger = tf.get_logger()
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


class TowerExtended(compat.MirroredExtended):
    """A strategy's ``extended`` part, over all processes."""

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[str],
        cross_device_ops: Any,
        transport: Transport,
    ):
        with _not_repeated():
            super().__init__(strategy, list(devices), cross_device_ops)
        self._transport = transport

    def _initialize_strategy(self, devices):
        if len(set(devices)) == len(devices):
            super()._initialize_strategy(devices)
            return
        # Towers that share a device, as for `verify`; TensorFlow refuses them
        # only because its collectives do.
        self._initialize_single_worker(devices)
        self._collective_ops = self._cross_device_ops

    def _call_for_each_replica(self, fn, args, kwargs):
        in_call = tf.executing_eagerly() and call_lib.current() is not None
        with _not_repeated():
            if in_call and not isinstance(fn, compat.TracedFunction):
                # Who calls fit() with run_eagerly=True need not be told by
                # TensorFlow, for every step, to use a tf.function.
                call = compat.call_for_each_replica
                return call(self._container_strategy(), fn, args, kwargs)
            return super()._call_for_each_replica(fn, args, kwargs)

    def _reduce_to(self, reduce_op, value, destinations, options):
        if self._transport.size == 1:
            return super()._reduce_to(reduce_op, value, destinations, options)

        def reduce(leaf: Any) -> Any:
            mean = reduce_op == tf.distribute.ReduceOp.MEAN
            if mean and isinstance(leaf, compat.Mirrored):
                return leaf
            if not isinstance(leaf, tf.distribute.DistributedValues):
                leaf = tf.convert_to_tensor(leaf)
                leaf = compat.PerReplica([leaf] * len(self.worker_devices))
            return self._get_cross_device_ops(leaf).reduce(
                reduce_op, leaf, destinations, options
            )

        return tf.nest.map_structure(reduce, value)

    def _gather_to_implementation(self, value, destinations, axis, options):
        if self._transport.size > 1 and not isinstance(
            value, tf.distribute.DistributedValues
        ):
            value = compat.PerReplica([value])
        return super()._gather_to_implementation(
            value, destinations, axis, options
        )

    def _experimental_distribute_dataset(self, dataset, options):
        return super()._experimental_distribute_dataset(
            self._of_this_rank(dataset), options
        )

    def _of_this_rank(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This rank's share of every global batch."""
        size, rank = self._transport.size, self._transport.rank
        if size == 1:
            return dataset

        def part(*batch):
            batch = batch[0] if len(batch) == 1 else batch
            split = data_lib.split(batch, size, rank, 1)
            (piece,) = split.pieces
            if isinstance(split.counts, tuple):
                return piece
            return tf.nest.map_structure(
                lambda leaf: data_lib.first_rows(leaf, split.counts[0]), piece
            )

        return dataset.map(part)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        transport = self._transport

        def fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return dataset_fn(
                tf.distribute.InputContext(
                    num_input_pipelines=transport.size,
                    input_pipeline_id=transport.rank,
                    num_replicas_in_sync=len(self.worker_devices)
                    * transport.size,
                )
            )

        if transport.size == 1:
            fn = dataset_fn
        return super()._distribute_datasets_from_function(fn, options)
