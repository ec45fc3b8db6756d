"""Keras's iterator over the batches of an epoch, for towers."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.callbacks import Start
from keras_towers.errors import TowerError
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.data import ranks as ranks_lib
from keras_towers.transport import Transport

logger = logging.getLogger("keras_towers")

# What Dataset.take() understands as all; the steps themselves find the end.
_UNTIL_ALL_END = -1


class TowerEpochIterator(compat.TFEpochIterator):
    """Keras's epoch iterator over batches for towers.

    Args:
        config: the towers.
        kind: the method of Keras that it is for.
        order: how ranks shuffle alike, where there are several.
        whole: towers take whole batches as they come, one at a time.
        **kwargs: for Keras's own iterator.

    Raises:
        TowerError: data to train on that cannot occupy the towers once, or
            ranks that were given different data.
    """

    _distributed_dataset: Any
    data_adapter: Any

    def __init__(
        self,
        config: TowerConfig,
        kind: str,
        order: ranks_lib.Order | None = None,
        whole: bool = False,
        **kwargs: Any,
    ):
        trains = kind == "fit"
        transport = config.transport
        ranks = transport.size > 1
        self._transport, self._kind = transport, kind
        self._towers = config.num_towers
        self._order = order
        # Validation data of ranks that train on their own are their own too.
        self.at_last_step = False
        self._each = config.batches == "each" and (trains or ranks)
        with order.of_arrays() if order else contextlib.nullcontext():
            super().__init__(distribute_strategy=_Undistributed, **kwargs)
            own = None
            arrays = isinstance(self.data_adapter, compat.ArrayDataAdapter)
            if arrays and ranks and not self._each:
                own = ranks_lib.of_arrays(self.data_adapter, config)
        by_user = isinstance(
            self._distributed_dataset, tf.distribute.DistributedDataset
        )
        self._each = self._each and not by_user and not whole
        if whole and by_user:
            raise TowerError(
                f"{config.name} hands out whole batches, and was given a "
                "distributed dataset: give fit() the dataset from which that "
                "was made."
            )
        self._agreed: int | None = None
        # To make an iterator over arrays changes nothing; that of a dataset
        # may draw a new shuffle, and one device would have drawn it too.
        self._reuses = arrays
        self._unused: Any = None
        self._skip = self._done = 0
        self._whole: tuple[int | None, int | None] | None = None
        dataset = self.source = self._distributed_dataset
        if not by_user:
            if trains:
                self._check_enough(dataset, config, whole)
            if ranks and not (self._each and kind.startswith("predict")):
                self._agree(transport, kind, dataset, config.num_replicas)
            self._distributed_dataset = data_lib.distribute(
                config, own or dataset, self._each, self._to_one_end, whole
            )
        self._set_steps()

    def _agree(
        self,
        transport: Transport,
        kind: str,
        dataset: tf.data.Dataset,
        replicas: int,
    ) -> None:
        """Make sure that all ranks run the same number of steps."""
        numbers = ranks_lib.agree(
            transport, kind, self.data_adapter.num_batches
        )
        if not self._each:
            ranks_lib.check_alike(numbers)
            ranks_lib.warn_of_shuffles(dataset)
            self._warn_of_idle_ranks(dataset, replicas)
        elif None in numbers or self.steps_per_epoch:
            self._agreed = _UNTIL_ALL_END
        else:
            self._agreed = max(-(-n // self._towers) for n in numbers)

    def _warn_of_idle_ranks(
        self, dataset: tf.data.Dataset, replicas: int
    ) -> None:
        size = data_lib.static_size(dataset.element_spec)
        if isinstance(self.data_adapter, compat.ArrayDataAdapter):
            size = self.data_adapter._batch_size
        if size and size < replicas and self._transport.rank == 0:
            logger.warning(
                "a batch of %d cannot occupy %d towers: in every step some "
                "compute nothing that counts. Give a batch_size of %d or more.",
                size,
                replicas,
                replicas,
            )

    def _to_one_end(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Make a rank's own ``TowerBatch``es as many as agreed."""
        if self._agreed is None:
            return dataset
        dataset = ranks_lib.endless(dataset, self._towers, self._first_batch)
        return dataset.take(self._agreed)

    def _first_batch(self) -> tf.data.Dataset:
        adapter = self.data_adapter
        if not isinstance(adapter, compat.GeneratorDataAdapter):
            return self.source
        # Another iterator over a generator would take from the first one.
        batch = adapter._first_batches[0]
        return tf.data.Dataset.from_generator(
            lambda: iter([batch]), output_signature=self.source.element_spec
        )

    def _check_enough(
        self, dataset: tf.data.Dataset, config: TowerConfig, whole: bool
    ) -> None:
        """Refuse to train on data that cannot occupy the towers once."""
        adapter = self.data_adapter
        batches, size = (
            adapter.num_batches,
            data_lib.static_size(dataset.element_spec),
        )
        have, what = None, "example"
        need = self._towers if self._each else config.num_replicas
        if self._each or whole:
            have, what = batches, "batch"
        elif isinstance(adapter, compat.ArrayDataAdapter):
            have = adapter._num_samples
        elif batches == 0:
            have = 0
        elif batches is not None and size:
            have = batches * size
        if whole:
            # Towers for which there is no batch have nothing to do.
            need = 0
            if have == 0:
                raise TowerError("the dataset is empty: give it one batch.")
        if have is not None and have < need:
            raise TowerError(
                f"the dataset has {_number(have, what)}, fewer than the "
                f"{need} {config.replicas_are_called}s: give at least "
                f"{need}, or use at most "
                f"{_number(max(have, 1), config.replicas_are_called)}."
            )

    def skip_to(self, start: Start) -> None:
        """Let the first epoch begin behind batches that are done."""
        self._skip = self._done = start.batch
        if self.steps_per_epoch:
            # Such epochs read on in the data where the last one ended.
            self._skip += start.epoch * self.steps_per_epoch
        self._whole = self.steps_per_epoch, self._num_batches

    def __iter__(self) -> Any:
        if self._whole is not None:
            steps, batches = self._whole
            self.steps_per_epoch = steps and steps - self._done
            self._num_batches = batches and batches - self._done
            self._done = 0
        return super().__iter__()

    def _get_iterator(self) -> Any:
        skip, self._skip = self._skip, 0
        if skip:
            if self._order is not None:
                self._order.next_epoch()
            return self._distributed_dataset.skip(skip)
        return _Reusing(self) if self._reuses else self._distributed_dataset

    def __next__(self) -> Any:
        step = super().__next__()
        self._unused = None
        steps = self.num_batches
        self.at_last_step = steps is not None and step[1] + 1 >= steps
        self._transport.mark(f"step {step[0]} of {self._kind}")
        return step

    def reset(self) -> None:
        super().reset()
        self._set_steps()

    def was_empty(self) -> bool:
        """Whether an epoch whose steps gave no logs had no batch at all."""
        return (
            self.steps_per_epoch is None
            and self._whole is None
            and not self.data_adapter.num_batches
            # Keras counts a step before it draws the step's data.
            and self._steps_seen <= self.steps_per_execution
        )

    def _set_steps(self) -> None:
        if self._agreed is not None:
            self._num_batches = self._agreed if self._agreed > 0 else None
        elif self._each and self._num_batches:
            self._num_batches = -(-self._num_batches // self._towers)


def _number(count: int, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


class _Reusing:
    """Gives an iterator that Keras made and never used, before a new one.

    Keras makes one at the end of an epoch and another at the start of the
    next; making one costs as much as many small steps.
    """

    def __init__(self, owner: TowerEpochIterator):
        self._owner = owner

    def __iter__(self) -> Any:
        owner = self._owner
        if owner._unused is None:
            if owner._order is not None:
                owner._order.next_epoch()
            owner._unused = iter(owner._distributed_dataset)
        return owner._unused


class _Undistributed:
    """Stands for a strategy that leaves a dataset as it is."""

    @staticmethod
    def experimental_distribute_dataset(dataset):
        return dataset
