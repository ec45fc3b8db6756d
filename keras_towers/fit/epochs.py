"""Keras's iterator over the batches of an epoch, for towers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import data as data_lib


class TowerEpochIterator(compat.TFEpochIterator):
    """Keras's epoch iterator over batches for towers.

    Args:
        strategy: the strategy.
        trains: whether it is for training, not for validation or prediction.
        **kwargs: for Keras's own iterator.

    Raises:
        TowerError: data to train on that cannot occupy the towers once.
    """

    def __init__(self, strategy: Any, trains: bool, **kwargs: Any):
        self._towers = strategy.num_towers
        self._each = trains and strategy.batches == "each"
        super().__init__(distribute_strategy=_Undistributed, **kwargs)
        by_user = isinstance(
            self._distributed_dataset, tf.distribute.DistributedDataset
        )
        self._each = self._each and not by_user
        # To make an iterator over arrays changes nothing; that of a dataset
        # may draw a new shuffle, and one device would have drawn it too.
        self._reuses = isinstance(self.data_adapter, compat.ArrayDataAdapter)
        self._unused: Any = None
        dataset = self.source = self._distributed_dataset
        if not by_user:
            if trains:
                self._check_enough(dataset)
            self._distributed_dataset = data_lib.distribute(
                strategy, dataset, self._each
            )
        self._set_steps()

    def _check_enough(self, dataset: tf.data.Dataset) -> None:
        """Refuse to train on data that cannot occupy the towers once."""
        adapter = self.data_adapter
        batches, size = (
            adapter.num_batches,
            data_lib.static_size(dataset.element_spec),
        )
        have, what = None, "example"
        if self._each:
            have, what = batches, "batch"
        elif isinstance(adapter, compat.ArrayDataAdapter):
            have = adapter._num_samples
        elif batches == 0:
            have = 0
        elif batches is not None and size:
            have = batches * size
        if have is not None and have < self._towers:
            raise TowerError(
                f"the dataset has {_number(have, what)}, fewer than the "
                f"{self._towers} towers: give at least {self._towers}, or use "
                f"at most {_number(max(have, 1), 'tower')}."
            )

    def _get_iterator(self) -> Any:
        return _Reusing(self) if self._reuses else self._distributed_dataset

    def __next__(self) -> Any:
        step = super().__next__()
        self._unused = None
        return step

    def reset(self) -> None:
        super().reset()
        self._set_steps()

    def was_empty(self) -> bool:
        """Whether an epoch whose steps gave no logs had no batch at all."""
        return (
            self.steps_per_epoch is None
            and not self.data_adapter.num_batches
            # Keras counts a step before it draws the step's data.
            and self._steps_seen <= self.steps_per_execution
        )

    def _set_steps(self) -> None:
        if self._each and self._num_batches:
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
            owner._unused = iter(owner._distributed_dataset)
        return owner._unused


class _Undistributed:
    """Stands for a strategy that leaves a dataset as it is."""

    @staticmethod
    def experimental_distribute_dataset(dataset):
        return dataset
