"""Towers of several processes that train one model together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import data as data_lib
from keras_towers.reduction import Exchange, exact
from keras_towers.strategies.tower import TowerStrategy
from keras_towers.transport import Transport


class ProcessStrategy(TowerStrategy):
    """Base of the strategies in which every process drives its own towers.

    Everything that ``TowerStrategy`` does within a process goes on between the
    processes: gradients, metrics and synchronized statistics are summed over
    the towers of a process in its memory, then over the processes.

    Args:
        transport: connects the processes.
        exchange: how gradients travel between them.
        **options: for ``TowerStrategy``.

    Attributes:
        rank: this process, 0 to size - 1.
        size: number of processes.
        local_rank: this process among those of its machine.
        local_size: number of processes of this machine.
        is_chief: whether this is rank 0.
    """

    def __init__(
        self,
        transport: Transport,
        exchange: Exchange = exact,
        **options: Any,
    ):
        self.transport = transport
        self.exchange = exchange
        if transport.size > 1 and options.get("towers") == 1:
            self.replicas_are_called = "rank"
        super().__init__(**options)

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.transport.size

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return self.transport.local_rank

    @property
    def local_size(self) -> int:
        """The number of processes of this machine."""
        return self.transport.local_size

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.transport.rank == 0

    def _make_extended(
        self, devices: list[str], cross_device_ops: tf.distribute.CrossDeviceOps
    ) -> None:
        tf.distribute.Strategy.__init__(
            self, ProcessExtended(self, devices, cross_device_ops)
        )

    def describe(self) -> str:
        """Say which process this is, and what runs on its towers."""
        return "\n".join(
            [
                super().describe(),
                f"  rank {self.rank} of {self.size} over {self.transport.name}"
                f"; {self.num_replicas} towers in all",
            ]
        )


class ProcessExtended(compat.MirroredExtended):
    """TensorFlow's side of the strategy: reductions and data span processes."""

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

    @property
    def _transport(self) -> Transport:
        return self._container_strategy().transport

    def _experimental_distribute_dataset(self, dataset, options):
        return super()._experimental_distribute_dataset(
            self._of_this_rank(dataset), options
        )

    def _of_this_rank(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This rank's part of every global batch."""
        size, rank = self._transport.size, self._transport.rank
        if size == 1:
            return dataset

        @tf.autograph.experimental.do_not_convert
        def part(*batch):
            batch = batch if len(batch) > 1 else batch[0]
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
                    num_replicas_in_sync=self._container_strategy().num_replicas,
                )
            )

        if transport.size == 1:
            fn = dataset_fn
        return super()._distribute_datasets_from_function(fn, options)
