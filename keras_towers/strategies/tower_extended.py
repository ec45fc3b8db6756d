"""``strategy.extended``: what TensorFlow uses outside of ``fit``.

Reductions, variables and data; ``run`` and the number of replicas are those of
``base.py``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_towers.fit.data import (
    batches as data_lib,
    same_data,
    tower_datasets,
)
from keras_towers.fit.weights.copies import mark_copies
from keras_towers.fit.weights.mirrored_variable import TowerMirroredVariable
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.reduction.gradients import Gradient, divide, is_sparse
from keras_towers.reduction.rank_sum import sum_over_ranks
from keras_towers.transport import Transport, next_key

Value: TypeAlias = "tf.distribute.DistributedValues | Gradient"
"""A value of all replicas, or one that they share."""


@contextlib.contextmanager
def _without_tf_info_logs() -> Iterator[None]:
    """Hide TensorFlow's logs of devices and of errors that it also raises."""

    def is_shown(record: logging.LogRecord) -> bool:
        from_tf_strategy = record.module in ("coordinator", "mirrored_strategy")
        return record.levelno > logging.INFO or not from_tf_strategy

    logger = tf.get_logger()
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


class TowerExtended(compat.MirroredExtended):
    """A strategy's ``extended`` part, over all processes."""

    def __init__(
        self, strategy: Strategy, devices: Sequence[str], transport: Transport
    ):
        ops = tf.distribute.ReductionToOneDevice()
        if transport.size > 1:
            ops = RankReduction(transport)
        with _without_tf_info_logs():
            super().__init__(strategy, list(devices), ops)
        self._transport = transport

    def _devices_like(self, destinations: object) -> object:
        """Return devices, given any destinations that TensorFlow takes.

        It asks whether they are true, and a variable then answers with its
        value. It also asks a tensor for its device, which it may not have in a
        function.
        """
        if isinstance(destinations, TowerMirroredVariable):
            return compat.Mirrored(destinations.values)
        if getattr(destinations, "device", destinations) == "":
            return self.worker_devices[0]
        return destinations

    def _get_replica_id_in_sync_group(self, replica_id):
        return self._container_strategy().first_tower + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group - self._container_strategy().first_tower

    @property
    def worker_devices_by_replica(self):
        """The devices of each replica of this process, by its number."""
        return {
            self._get_replica_id_in_sync_group(tower): [device]
            for tower, device in enumerate(self.worker_devices)
        }

    @property
    def should_checkpoint(self):
        """Whether this process saves checkpoints."""
        return self._container_strategy().is_chief

    @property
    def should_save_summary(self):
        """Whether this process writes summaries."""
        return self.should_checkpoint

    def _create_variable(self, next_creator, **kwargs):
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is compat.MirroredVariable:
            # TensorFlow's tables of classes are those of all strategies.
            variable.__class__ = TowerMirroredVariable
            mark_copies(variable)
        if not compat.in_replica():
            self._container_strategy()._adoption.note_created(variable)
        return variable

    def _get_variable_creator_initial_value(
        self, replica_id, device, primary_var, **kwargs
    ):
        value = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
        is_first = replica_id == 0 and compat.in_replica()
        if self._transport.size == 1 or not is_first:
            return value

        def of_rank_0() -> tf.Tensor:
            first: Any = value() if callable(value) else value
            first = tf.convert_to_tensor(first, kwargs.get("dtype"))
            if first.dtype == tf.string:  # Which cannot be sent.
                return first
            key = next_key("initial")
            return self._transport.broadcast([first], key)[0]

        return of_rank_0

    def _call_for_each_replica(self, fn, args, kwargs):
        with _without_tf_info_logs():
            return super()._call_for_each_replica(fn, args, kwargs)

    def _get_cross_device_ops(self, value):
        # For int32, TensorFlow would use others, which reduce within one
        # process, and refuse int32 and float32 together.
        if self._transport.size > 1 or self._use_merge_call():
            return self._cross_device_ops
        return super()._get_cross_device_ops(value)

    def _broadcast_to(self, tensor, destinations):
        return super()._broadcast_to(tensor, self._devices_like(destinations))

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        pairs = [(v, self._devices_like(d)) for v, d in value_destination_pairs]
        return super()._batch_reduce_to(reduce_op, pairs, options)

    def _reduce_to(self, reduce_op, value, destinations, options):
        destinations = self._devices_like(destinations)
        if self._transport.size == 1:
            return super()._reduce_to(reduce_op, value, destinations, options)

        def reduce(leaf: Value) -> Value:
            mean = reduce_op == tf.distribute.ReduceOp.MEAN
            if mean and isinstance(leaf, compat.Mirrored):
                return leaf
            if not isinstance(leaf, tf.distribute.DistributedValues):
                if not is_sparse(leaf):
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
        destinations = self._devices_like(destinations)
        return super()._gather_to_implementation(
            value, destinations, axis, options
        )

    def _experimental_distribute_dataset(self, dataset, options):
        config, transport = self._container_strategy()._config, self._transport
        size, rank = transport.size, transport.rank
        if size == 1:
            return super()._experimental_distribute_dataset(dataset, options)
        if config.options.batches == "each":
            return self._distribute_datasets_from_function(
                lambda _: dataset, options
            )

        def share(batch: Structure) -> Structure:
            return data_lib.Batch.of(batch).split(size, rank, 1).pieces[0]

        if not any(data_lib.Batch.of(dataset.element_spec).divided):
            raise TowerError(
                f"the elements of {dataset!r} have no rows that ranks could "
                "divide: call .batch(n) before you distribute it."
            )
        if tf.executing_eagerly():
            adapter = compat.TFDatasetAdapter(dataset)
            same_data.compare_data(
                transport, "a loop", adapter, dataset, is_same=True
            )
        else:
            same_data.check_order(dataset)
        dataset = tower_datasets.in_one_order(dataset, config)
        dataset = tower_datasets.mapped(dataset, share)
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        transport = self._transport

        def fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            dataset = dataset_fn(
                tf.distribute.InputContext(
                    num_input_pipelines=transport.size,
                    input_pipeline_id=transport.rank,
                    num_replicas_in_sync=len(self.worker_devices)
                    * transport.size,
                )
            )
            if transport.size > 1:
                same_data.check_shards(dataset)
            return dataset

        return super()._distribute_datasets_from_function(fn, options)

    def _experimental_distribute_values_from_function(self, value_fn):
        strategy = self._container_strategy()

        def fn(context: tf.distribute.experimental.ValueContext) -> object:
            replica = strategy.first_tower + context.replica_id_in_sync_group
            return value_fn(
                tf.distribute.experimental.ValueContext(
                    replica, strategy.num_replicas
                )
            )

        return super()._experimental_distribute_values_from_function(fn)


class RankReduction(tf.distribute.ReductionToOneDevice):
    """Reduces values to one device of each rank, then over all ranks.

    Gradients do not come here: a ``WeightUpdate`` sums them.
    """

    def __init__(self, transport: Transport):
        super().__init__()
        self._transport = transport

    @property
    def _num_between_graph_workers(self) -> int:
        # If this is 1, TensorFlow treats a single value as its own sum.
        return self._transport.size

    def reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: Value,
        destinations: object,
        options: object,
    ) -> Value:
        """Reduce one value; TensorFlow calls this."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Sequence[tuple[Value, object]],
        options: object,
    ) -> list[Value]:
        """Reduce several values; TensorFlow calls this."""
        reduce_here = super().reduce_implementation
        here = [
            _first(reduce_here(reduce_op, value, destinations, options))
            for value, destinations in value_destination_pairs
        ]
        totals = sum_over_ranks(self._transport, here)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            totals = [divide(total, self._transport.size) for total in totals]
        pairs = zip(totals, value_destination_pairs, strict=True)
        return [self.broadcast(total, there) for total, (_, there) in pairs]

    def _gather_implementation(
        self,
        per_replica_value: Value,
        destinations: object,
        axis: int,
        options: object,
    ) -> Value:
        here = _first(
            super()._gather_implementation(
                per_replica_value, destinations, axis, options
            )
        )
        rows = keras.ops.swapaxes(here, 0, axis)
        rows = self._transport.all_gather(rows, next_key("gather"))
        return self.broadcast(keras.ops.swapaxes(rows, 0, axis), destinations)


def _first(value: Value) -> Gradient:
    """Return a value, or the first replica's value."""
    several = isinstance(value, tf.distribute.DistributedValues)
    return value.values[0] if several else value
