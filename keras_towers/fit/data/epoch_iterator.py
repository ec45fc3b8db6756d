"""Keras's epoch iterator over the batches of towers.

``fit/calls/keras_loop.py`` gives it to Keras's loop; ``batches.py`` splits the
batches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_towers.fit.components import FitStart
from keras_towers.fit.context import patches
from keras_towers.fit.data import (
    batches as data_lib,
    model_use,
    same_data,
    tower_datasets,
)
from keras_towers.fit.data.data_use import DataUse, Owner
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError, shorten
from keras_towers.foundation.notices import first_time, logger
from keras_towers.foundation.object_types import Structure

# The name of the thread that waits for pending reads, then frees the data.
RELEASES = "keras-towers-releases"
_PREFETCHED_BATCHES = 2
# For Dataset.take(): all elements; a step stops when all data have ended.
_UNTIL_ALL_END = -1


class TowerEpochIterator(compat.TFEpochIterator):
    """Keras's epoch iterator over per-tower batches.

    Args:
        use: the use of its data.
        **kwargs: the arguments of Keras's own iterator.
    """

    _distributed_dataset: tf.data.Dataset
    _current_iterator: Iterator[Structure] | None
    _epoch_iterator: Any
    data_adapter: Any
    steps_per_epoch: int | None

    def __init__(self, use: DataUse, **kwargs: object):
        self._use, self._kind = use, use.kind
        self._config, self._places = use.config, use.places
        batch_ranks, order = use.places.ranks.batch, use.order
        self.at_last_step: bool = False
        name = type(kwargs.get("x")).__name__
        with order.of_arrays() if order else contextlib.nullcontext():
            with (
                use.within(f"{name}'s first batches"),
                model_use.noting() as used,
            ):
                super().__init__(distribute_strategy=Undistributed, **kwargs)
            adapter, local_rows = self.data_adapter, None
            self._has_arrays = isinstance(adapter, compat.ArrayDataAdapter)
            self.source: tf.data.Dataset = self._distributed_dataset
            self._owner: Owner = use.owner_of(self.source)
            is_global = self._owner is Owner.ALL
            self._run_events_within(name)
            # Whether steps read their batches themselves, one by one, as these
            # use what steps write.
            self.is_read_by_steps: bool = (
                model_use.is_read_by_steps(adapter)
                # Asynchronous towers take batches whenever they need them.
                and self._owner is not Owner.TOWER
                and model_use.are_any(used, use.state())
            )
            if self.is_read_by_steps:
                self.source = model_use.without_read_ahead(self.source)
            # Why what reads the data must not use the model.
            self.why_not_use: str = ""
            if is_global and batch_ranks.size > 1:
                self.why_not_use = model_use.why_not_use(adapter)
            if self._has_arrays and is_global and batch_ranks.size > 1:
                local_rows = tower_datasets.read_local_rows(adapter, use.places)
        self._common_steps: int | None = None
        # Keras creates an iterator at the end of an epoch and another at the
        # start of the next, and creating one is expensive.
        self._fresh_iterator: Iterator[Structure] | None = None
        self._batches_to_skip = self._batches_done = 0
        self._steps_and_batches: tuple[int | None, int | None] | None = None
        self._resumed_steps: Iterator[Structure] | None = None
        # The batch that Keras's next step reads.
        self._read: Any = None
        if self._owner is not Owner.USER:
            if use.kind == "fit":
                self._check_enough()
            if is_global:
                self._warn_if_idle()
            if batch_ranks.size > 1:
                self._agree_on_steps()
            dataset = local_rows or self.source
            if is_global and batch_ranks.size > 1:
                dataset = tower_datasets.in_one_order(dataset, use.config)
            self._distributed_dataset = self._prefetch(dataset)
        self._set_steps()
        if use.epochs is not None and is_global:
            self._limit_reads(use.epochs)

    def _run_events_within(self, name: str) -> None:
        """Run the events of the data within the block for their code."""
        adapter = self.data_adapter

        def run(event: str, original: patches.Original) -> None:
            with self._use.within(f"{name}.{event}"):
                original()

        for event in ("on_epoch_begin", "on_epoch_end"):
            original = getattr(adapter, event)
            setattr(adapter, event, functools.partial(run, event, original))

    def _limit_reads(self, epochs: int) -> None:
        """Read no more batches of a generator than there are steps.

        A batch that is prefetched without a step is lost, since a generator
        cannot go back. How many these are depends on time: ranks that read from
        the same generator again would go on with different batches.
        """
        adapter, steps = self.data_adapter, self.steps_per_epoch
        if not steps or not isinstance(adapter, compat.GeneratorDataAdapter):
            return
        executions = -(-steps // self.steps_per_execution)
        batches = epochs * executions * self.steps_per_execution
        read = adapter.generator
        adapter.generator = lambda: itertools.islice(read(), batches)

    def _agree_on_steps(self) -> None:
        """Make all ranks run the same number of steps."""
        if self._owner is Owner.RANK:
            same_data.check_shards(self.source)
        numbers, shapes = same_data.compare_data(
            self._places.ranks.batch,
            self._kind,
            self.data_adapter,
            self.source,
            self._owner is not Owner.RANK,
        )
        if shapes is not None:
            # A step for other static shapes may have other operations.
            forget = functools.partial(tower_datasets.with_shapes, shapes)
            self.source = tower_datasets.mapped(self.source, forget)
        if self._owner is Owner.RANK:
            known = [n for n in numbers if n is not None]
            if len(known) < len(numbers) or self.steps_per_epoch:
                self._common_steps = _UNTIL_ALL_END
            else:
                towers = self._places.towers
                self._common_steps = max(-(-n // towers) for n in known)

    def _warn_if_idle(self) -> None:
        """Warn once if batches of arrays have fewer rows than replicas."""
        size, replicas = self.batch_size, self._places.replicas
        is_first = self._places.ranks.job.rank == 0
        idles = size and size < replicas and is_first
        strategy = self._config.strategy
        if idles and first_time(strategy, ("idle towers", size)):
            logger.warning(
                "a batch of %d cannot occupy %d towers, so some towers are "
                "idle in every step. Use a batch_size of %d or more.",
                size,
                replicas,
                replicas,
            )

    def _prefetch(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Prefetch batches for the towers.

        Batches of Python objects are not prefetched here: callbacks may change
        what these return next. Keras prefetches them already.
        """
        adapters = compat.GeneratorDataAdapter, compat.PyDatasetAdapter
        is_python = isinstance(self.data_adapter, adapters)
        strategy, towers = self._config.strategy, self._config.num_towers
        is_global = self._owner is Owner.ALL
        batch = data_lib.Batch.of(self.source.element_spec)
        # TensorFlow may divide batches over towers, before steps, if they have
        # only parts with a row for each example.
        is_divided_ahead = (
            self._config.prefetches_to_towers
            and self._owner is not Owner.TOWER
            and not is_python
            and (not is_global or batch.has_rows_only)
        )
        if not is_divided_ahead:
            if self._owner is Owner.RANK:
                dataset = self._group(dataset)
            if is_python:
                return dataset
            takers = towers if self._owner is Owner.TOWER else 1
            return dataset.prefetch(max(_PREFETCHED_BATCHES, takers))
        if is_global:
            return strategy.experimental_distribute_dataset(
                tower_datasets.mapped(dataset, tower_datasets.with_equal_rows)
            )
        dataset = tower_datasets.mapped(dataset, tower_datasets.forget_sizes)
        return strategy.distribute_datasets_from_function(lambda _: dataset)

    def _group(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Group batches into the agreed number of ``TowerBatch``es."""
        towers = self._config.num_towers
        dataset = tower_datasets.group(dataset, towers)
        if self._common_steps is None:
            return dataset

        # A rank whose data has ended must still take part in collectives.
        def without_rows(batch: Structure) -> data_lib.TowerBatch:
            rows = data_lib.rows_if(batch, tf.constant(False))
            return data_lib.TowerBatch((rows,) * towers)

        empty = tower_datasets.mapped(self._first_batch().take(1), without_rows)
        endless = dataset.concatenate(empty.cache().repeat())
        return endless.take(self._common_steps)

    def _first_batch(self) -> tf.data.Dataset:
        adapter = self.data_adapter
        if not isinstance(adapter, compat.GeneratorDataAdapter):
            return self.source
        # A second iterator over a generator would consume its batches.
        batch = adapter._first_batches[0]
        return tf.data.Dataset.from_generator(
            lambda: iter([batch]), output_signature=self.source.element_spec
        )

    def _check_enough(self) -> None:
        """Reject data without examples or without a batch for every tower."""
        have, need = self.data_adapter.num_batches, self._config.num_towers
        size = data_lib.Batch.of(self.source.element_spec).static_size
        if have == 0 or size == 0:
            raise TowerError("the dataset is empty: give at least one example.")
        if self._owner is Owner.RANK and have is not None and have < need:
            raise TowerError(
                f"the dataset has fewer batches ({have}) than there are "
                f"towers ({need}): give more, or use fewer towers."
            )

    def skip_to(self, start: FitStart) -> None:
        """Skip the batches before ``start`` in the first epoch."""
        self._batches_to_skip = self._batches_done = start.batch
        if self.steps_per_epoch:
            # With steps_per_epoch, an epoch continues where the last one ended.
            self._batches_to_skip += start.done * self.steps_per_epoch
        else:
            compat.begin_with_epoch(self.data_adapter, start.done)
            if self._use.order is not None:
                self._use.order.begin_with(start.done)
        if isinstance(self.data_adapter, compat.TFDatasetAdapter):
            self._redraw(start.done)
        self._steps_and_batches = self.steps_per_epoch, self._num_batches

    def _redraw(self, epochs: int) -> None:
        """Make a dataset draw the orders of earlier epochs, without reading."""
        if self.steps_per_epoch or self._owner is Owner.USER:
            return
        # Keras creates another one behind an epoch whose length it knows.
        iterators = 2 if self._num_batches else 1
        for _ in range(epochs * iterators):
            iter(self.source)

    def skip_batches(self, batches: int) -> tuple[int, int]:
        """Read batches as ``fit`` does, without training on them."""
        epochs = 0
        while batches:
            before = batches
            with self.catch_stop_iteration():
                for step in self:
                    if batches < self.steps_per_execution:
                        self._resumed_steps = itertools.chain(
                            [step], self._epoch_iterator
                        )
                        return epochs, batches
                    size = self.steps_per_execution
                    _, _, data = compat.execution_of(step, size)
                    for _ in range(size):
                        next(data)
                        batches -= 1
            if batches == before:
                break
            epochs += 1
        return epochs, 0

    def __iter__(self) -> Iterator[Structure]:
        if self._resumed_steps is not None:
            self._epoch_iterator = self._resumed_steps
            self._resumed_steps = None
            return self
        if self._steps_and_batches is not None:
            steps, batches = self._steps_and_batches
            self.steps_per_epoch = steps and steps - self._batches_done
            self._num_batches = batches and batches - self._batches_done
            self._batches_done = 0
        return super().__iter__()

    def _get_iterator(self) -> Iterable[Structure]:
        skip, self._batches_to_skip = self._batches_to_skip, 0
        # Only iterators over arrays are reused: creating one over a dataset may
        # draw a new shuffle, as it would on one device.
        if not skip and not self._has_arrays:
            return self._distributed_dataset
        if not skip and self._fresh_iterator is not None:
            return self._fresh_iterator
        if self._use.order is not None:
            self._use.order.next_epoch()
        if skip:
            return self._distributed_dataset.skip(skip)
        self._fresh_iterator = iter(self._distributed_dataset)
        return self._fresh_iterator

    def __next__(self) -> Structure:
        self._use.on_next_step()
        step = super().__next__()
        self._fresh_iterator = None
        size = self.steps_per_execution
        first, last, self._read = compat.execution_of(step, size)
        steps = self.num_batches
        self.at_last_step = steps is not None and last + 1 >= steps
        ranks = self._places.ranks
        if ranks.job.size > 1:
            is_own = ranks.batch.size == 1
            wait = "" if is_own else f"step {first} of {self._kind}"
            self._config.transport.note_wait(wait)
        return step

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        with super().catch_stop_iteration():
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError) as error:
                if self._owner is Owner.ALL and self._places.ranks.in_lockstep:
                    if self._places.ranks.batch.size > 1 and self._goes_on():
                        raise TowerError(
                            f"a step of {self._kind} has raised "
                            f"{shorten(error)}, which Keras takes for the end "
                            "of the data, but there are more batches. This "
                            "rank would end the epoch, and others would wait "
                            "for it. Catch the error in the step."
                        ) from error
                    # Keras counts a step before it draws the step's data.
                    seen = self._steps_seen - self.steps_per_execution
                    self._use.end_data(seen)
                raise

    def _goes_on(self) -> bool:
        """Whether there are more batches to read."""
        read = self._read
        if not isinstance(
            read, tf.data.Iterator | tf.distribute.DistributedIterator
        ):
            return False
        return bool(read.get_next_as_optional().has_value())

    def reset(self) -> None:
        super().reset()
        self._set_steps()

    def release(self) -> None:
        """Release the data, once pending reads are done.

        Keras's generator and its iterator reference each other. Data that never
        arrives delays only the exit of the process, and keeps no model.
        """
        self._use = DataUse(self._config, self._places, self._kind)
        iterators = [
            self._epoch_iterator,
            self._current_iterator,
            self._fresh_iterator,
            self._read,
        ]
        self._epoch_iterator = self._current_iterator = None
        self._fresh_iterator = self._read = None
        threading.Thread(target=iterators.clear, name=RELEASES).start()

    @property
    def batch_size(self) -> int | None:
        """The number of examples of a global batch, None if unknown.

        A rank that reads its own data, or a dataset that the user distributed,
        does not know the batch sizes of the other ranks.
        """
        if self._owner in (Owner.RANK, Owner.USER):
            return None
        if self._has_arrays:
            return self.data_adapter._batch_size
        size = data_lib.Batch.of(self.source.element_spec).static_size
        return size or compat.batch_size_of(self.source)

    def has_unknown_rows(self) -> bool:
        """Whether the parts of a batch may have different numbers of rows."""
        if self._has_arrays or compat.batches_all_parts(self.source):
            return False
        batch = data_lib.Batch.of(self.source.element_spec)
        return batch.static_size is None and sum(batch.divided) > 1

    def was_empty(self) -> bool:
        """Whether an epoch without logs had no batches at all."""
        return (
            self.steps_per_epoch is None
            and self._steps_and_batches is None
            and not self.data_adapter.num_batches
            # Keras counts a step before it draws the step's data.
            and self._steps_seen <= self.steps_per_execution
        )

    def _set_steps(self) -> None:
        if self._common_steps is not None:
            self._num_batches = (
                self._common_steps if self._common_steps > 0 else None
            )
        elif self._owner is Owner.RANK and self._num_batches:
            self._num_batches = -(-self._num_batches // self._config.num_towers)


class Undistributed:
    """A strategy stand-in that does not distribute datasets."""

    @staticmethod
    def experimental_distribute_dataset(
        dataset: tf.data.Dataset,
    ) -> tf.data.Dataset:
        """Return the dataset unchanged."""
        return dataset
