"""Agreement between ranks on the order and the length of their data."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.contract import Start, TowerConfig
from keras_towers.fit.data import batches as data_lib
from keras_towers.meeting import check
from keras_towers.meeting.check import Peers

logger = logging.getLogger("keras_towers")

_ENDS = 4
_REMEDY = (
    "Give every rank all of the data, and it takes its part of each batch; or "
    'set batches="each" to let every rank read its own data.'
)


class Order:
    """Makes Keras shuffle identically on all ranks."""

    # Ranks with equal seeds draw the same orders anyway, which are those of one
    # process. Otherwise all ranks shuffle with a seed drawn by rank 0. Where
    # ``fit`` resumes at a position ``start``, orders depend only on its seed
    # and on the epoch.

    def __init__(self, peers: Peers, start: Start | None = None):
        state = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
        mine = (
            compat.global_seed(),
            state,
            random.SystemRandom().getrandbits(31),
        )
        states = check.gather(peers, mine, "begins to shuffle")
        self._seed = states[0][2] if start is None else start.seed
        seeds = {state[0] for state in states}
        self._tensorflow_agrees = len(seeds) == 1 and None not in seeds
        self._python_agrees = len({state[1] for state in states}) == 1
        # The first iterator increments it.
        self._number = -1 if start is None else start.epoch - 1
        self._epoch: tf.Variable | None = None

    @contextlib.contextmanager
    def of_sequences(self) -> Iterator[None]:
        """Shuffle ``PyDataset`` batches identically during ``fit``."""
        module: Any = compat.py_dataset_module
        if self._python_agrees:
            yield
            return
        module.random = random.Random(self._seed)
        try:
            yield
        finally:
            module.random = random

    @contextlib.contextmanager
    def of_arrays(self) -> Iterator[None]:
        """Shuffle examples identically in datasets created inside."""
        if self._tensorflow_agrees:
            yield
            return
        original = tf.random.shuffle
        self._epoch = compat.hidden_variable("CPU:0", self._number)

        def shuffle(value: Any, *args: Any, **kwargs: Any) -> Any:
            return tf.random.experimental.stateless_shuffle(  # pyright: ignore[reportAttributeAccessIssue]
                value, tf.stack([self._seed, self._epoch])
            )

        tf.random.shuffle = shuffle
        try:
            yield
        finally:
            tf.random.shuffle = original

    def next_epoch(self) -> None:
        """Use a new order for the next iterator."""
        if self._epoch is not None:
            self._epoch.assign_add(1)


def agree(
    peers: Peers, kind: str, adapter: Any, same_data: bool
) -> list[int | None]:
    """Return each rank's number of batches, None if unknown."""
    where = f"begins to read the data of {kind}"
    mine = adapter.num_batches, digest(adapter)
    plans = check.gather(peers, mine, where)
    numbers = [plan[0] for plan in plans]
    if same_data:
        _check_alike(numbers, [plan[1] for plan in plans])
    return numbers


def digest(adapter: Any) -> str:
    """A digest of the first and the last examples, where they are in memory."""
    if not isinstance(adapter, compat.ArrayDataAdapter):
        return ""
    rows = []
    for leaf in tf.nest.flatten(adapter._inputs):
        try:
            ends = [np.asarray(part) for part in (leaf[:_ENDS], leaf[-_ENDS:])]
        except Exception:  # A sparse or ragged array, or a data frame.
            return ""
        rows += [(end.shape, end.dtype.str, _content(end)) for end in ends]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _content(array: np.ndarray) -> Any:
    if array.dtype.kind != "O":
        return array.tobytes()
    # Strings; other objects need not be known by the same words on all ranks.
    return [v for v in array.flat if isinstance(v, str | bytes)]


def _check_alike(numbers: list[int | None], digests: list[str]) -> None:
    """Check that all ranks have the same data, by numbers and digests."""
    for rank, other in enumerate(digests):
        if other != digests[0] and numbers[rank] == numbers[0]:
            raise TowerError(
                f"the ranks were given different data: rank {rank} has other "
                f"examples than rank 0, in as many batches. {_REMEDY}"
            )
    if len(set(numbers)) > 1:
        counts = ["an unknown number" if n is None else n for n in numbers]
        raise TowerError(
            "the ranks were given different data: they have different numbers "
            f"of batches ({check.each(counts)}). {_REMEDY}"
        )


def of_arrays(adapter: Any, config: TowerConfig) -> tf.data.Dataset | None:
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
        mine = data_lib.split(
            batch,
            config.num_replicas,
            config.first_tower,
            config.num_towers,
        )
        pieces = tuple(
            tf.nest.map_structure(lambda a, p=piece: tf.gather(a, p), arrays)
            for piece in mine.pieces
        )
        return mine._replace(pieces=pieces)

    arrays = tf.data.Dataset.from_tensors(arrays).repeat()
    return tf.data.Dataset.zip((numbers, arrays)).map(
        examples, num_parallel_calls=tf.data.AUTOTUNE
    )


def warn_of_shuffles(dataset: tf.data.Dataset) -> None:
    """Warn of a dataset that each rank would shuffle differently."""
    for part in _parts(dataset):
        if type(part).__name__ == "_ShuffleDataset" and not any(
            int(getattr(part, name, 1)) for name in ("_seed", "_seed2")
        ):
            logger.warning(
                "the dataset shuffles without a seed, so every rank reads it "
                "in a different order, and an epoch uses some examples twice: "
                "call keras.utils.set_random_seed() before creating it, or "
                "pass a seed to shuffle()."
            )
            return


def _parts(dataset: Any) -> Iterator[Any]:
    yield dataset
    for parent in dataset._inputs():
        yield from _parts(parent)


def endless(
    dataset: tf.data.Dataset, towers: int, first: Callable[[], tf.data.Dataset]
) -> tf.data.Dataset:
    """Extend a dataset endlessly by steps without examples."""
    # A rank whose data has ended thus still takes part in collectives.

    def borrowed(*batch: Any) -> data_lib.TowerBatch:
        batch = batch[0] if len(batch) == 1 else batch
        row = tf.nest.map_structure(
            lambda leaf: data_lib.first_rows(leaf, 1), batch
        )
        counts = tf.zeros([towers], tf.int64)
        return data_lib.TowerBatch((row,) * towers, counts)

    lent = first().take(1).map(borrowed).cache().repeat()
    return dataset.concatenate(lent)
