"""TensorFlow's side of a strategy: its reductions and its data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.devices import same_device, same_devices
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.data import batches as data_lib
from keras_towers.reduction import (
    Gradient,
    Reduction,
    divide,
    sum_over_ranks,
)
from keras_towers.transport import SingleProcess, Transport
from keras_towers.transport.keys import next_key


@contextlib.contextmanager
def _without_tf_info_logs() -> Iterator[None]:
    """Drop logs of TensorFlow in a notebook: devices, and repeated errors."""

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
        self,
        strategy: Strategy,
        devices: Sequence[str],
        reduction: Reduction,
        transport: Transport,
    ):
        ops = ReductionCrossDeviceOps(reduction, transport)
        with _without_tf_info_logs():
            super().__init__(strategy, list(devices), ops)
        self._transport = transport

    def _call_for_each_replica(self, fn, args, kwargs):
        in_call = tf.executing_eagerly() and call_lib.current() is not None
        with _without_tf_info_logs():
            if in_call and not isinstance(fn, compat.TracedFunction):
                # Who calls fit() with run_eagerly=True need not be told by
                # TensorFlow, for every step, to use a tf.function.
                call = compat.call_for_each_replica
                return call(self._container_strategy(), fn, args, kwargs)
            return super()._call_for_each_replica(fn, args, kwargs)

    def _get_cross_device_ops(self, value):
        # Those that TensorFlow takes for int32 know of one process only.
        if self._transport.size > 1:
            return self._cross_device_ops
        return super()._get_cross_device_ops(value)

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
            return piece

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


class ReductionCrossDeviceOps(tf.distribute.CrossDeviceOps):
    """Wraps a reduction over all processes in ``tf.distribute.CrossDeviceOps``.

    All values of one call that are on the same devices are reduced together, so
    that the reduction can pack them. Everything but an all-reduce over the
    towers is left to TensorFlow's ``tf.distribute.ReductionToOneDevice``: other
    destinations, int32 values (which TensorFlow keeps on the host), means of
    integers, values that are not per replica, and gathering.
    """

    def __init__(
        self, reduction: Reduction, transport: Transport | None = None
    ):
        super().__init__()
        self.reduction = reduction
        self._transport = transport or SingleProcess()
        self._one_device = tf.distribute.ReductionToOneDevice()

    @property
    def _num_between_graph_workers(self) -> int:
        # If this is 1, TensorFlow treats a single value as its own sum.
        return self._transport.size

    def reduce_implementation(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: Any,
    ) -> Any:
        """Reduce one value; TensorFlow calls this."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any,
    ) -> list[Any]:
        """Reduce several values; TensorFlow calls this."""
        results: list[Any] = [None] * len(value_destination_pairs)
        together: dict[tuple[str, ...], list[int]] = {}
        for index, (value, target) in enumerate(value_destination_pairs):
            if _is_all_reduce(reduce_op, value, target):
                together.setdefault(_devices(value), []).append(index)
            else:
                results[index] = self._reduce_to_one_device(
                    reduce_op, value, target, options
                )
        for devices, indices in together.items():
            values = [value_destination_pairs[index][0] for index in indices]
            for index, row in zip(
                indices,
                self._all_reduce(reduce_op, values, devices),
                strict=True,
            ):
                results[index] = compat.regroup(row, wrap_class=compat.Mirrored)
        return results

    def _reduce_to_one_device(
        self,
        reduce_op: Any,
        value: Any,
        target: Any,
        options: Any,
    ) -> Any:
        result = self._one_device.reduce_implementation(
            reduce_op, value, target, options
        )
        size = self._transport.size
        if size == 1:
            return result
        if isinstance(result, tf.distribute.DistributedValues):
            result = result.values[0]
        (total,) = sum_over_ranks(self._transport, [result])
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            with tf.device(total.device):
                total = divide(total, size)
        return self._one_device.broadcast(total, target)

    def _all_reduce(
        self,
        reduce_op: Any,
        values: Sequence[Any],
        devices: tuple[str, ...],
    ) -> list[tuple[Gradient, ...]]:
        """Map N values on K devices to N tuples of K sums or means."""
        towers = range(len(devices))
        sums = self.reduction(
            [[value.values[k] for value in values] for k in towers], devices
        )
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            count = len(devices) * self._transport.size
            means = []
            for device, row in zip(devices, sums, strict=True):
                with tf.device(device):
                    means.append([divide(total, count) for total in row])
            sums = means
        return [
            tuple(sums[k][index] for k in towers)
            for index in range(len(values))
        ]

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        result = self._one_device._gather_implementation(
            per_replica_value, destinations, axis, options
        )
        if self._transport.size == 1:
            return result
        if isinstance(result, tf.distribute.DistributedValues):
            result = result.values[0]
        rows = _swap(result, axis)
        rows = self._transport.all_gather(rows, next_key("gather"))
        return self._one_device.broadcast(_swap(rows, axis), destinations)


def _swap(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Swap the first dimension and ``axis``."""
    if axis == 0:
        return tensor
    order = list(range(tensor.shape.rank))
    order[0], order[axis] = order[axis], order[0]
    return tf.transpose(tensor, order)


def _is_all_reduce(reduce_op: Any, value: Any, target: Any) -> bool:
    if not isinstance(value, compat.PerReplica):
        return False
    if not all(
        isinstance(part, (tf.Tensor, tf.IndexedSlices)) for part in value.values
    ):
        return False
    dtype = value.values[0].dtype
    if dtype == tf.int32 or dtype == tf.bool:
        return False
    mean = reduce_op == tf.distribute.ReduceOp.MEAN
    if mean and not (dtype.is_floating or dtype.is_complex):
        return False
    devices = _devices(value)
    return same_devices(devices, _devices(target)) and not any(
        same_device(one, other)
        for k, one in enumerate(devices)
        for other in devices[:k]
    )


def _devices(value: Any) -> tuple[str, ...]:
    """The devices of a value or variable, or named by a destination."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, tf.distribute.DistributedValues):
        return tuple(part.device for part in value.values)
    return (getattr(value, "device", None) or "",)
