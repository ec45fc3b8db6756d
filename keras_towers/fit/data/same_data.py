"""Checks that all ranks read the same data, by fingerprints of it.

``epoch_iterator.py`` compares data before an epoch; ``fit/step/global_step.py``
compares batches in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._types import Structure
from keras_towers.errors import TowerError
from keras_towers.fit.context import step_errors
from keras_towers.rendezvous import rank_checks
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.transport import Transport, next_key

_REMEDY = (
    'With batches="split", every rank must read the same data in the same '
    "order: leave out `shard`, give shuffles and random augmentations the "
    "same seed on every rank (keras.utils.set_random_seed), leave "
    "num_parallel_calls out of maps whose Python code or inner datasets draw, "
    "sort sets of words (or start Python with PYTHONHASHSEED=0), and do not "
    "set deterministic=False. If every rank should read its own data, set "
    'batches="each".'
)
# About how many values of each tensor a fingerprint covers.
_VALUES = 2**12
# About how many rows of arrays a fingerprint covers.
_ROWS = 64
_PRIME = 1_000_000_007
_FACTORS = [[618_033], [414_213]]
SIZE: int = 2 + len(_FACTORS)
"""How many numbers a fingerprint has."""
# Machines may round differently when they compute on the same data.
_TOLERANCE = 1e-4


def compare_data(
    peers: Peers, kind: str, adapter: Any, same: tf.data.Dataset | None
) -> list[int | None]:
    """Compare the ranks' data; return the numbers of their batches, or None.

    Args:
        same: the dataset, which must be the same on all ranks; None: each rank
            has its own data.

    Raises:
        TowerError: the ranks must have the same data, but do not.
    """
    where = f"begins to read the data of {kind}"
    varies = None if same is None else _why_order_varies(same)
    plan = adapter.num_batches, fingerprint_rows(adapter), varies
    plans = rank_checks.gather(peers, plan, where)
    numbers, fingerprints, reasons = map(list, zip(*plans, strict=True))
    if same is None:
        return numbers
    if len(set(numbers)) > 1:
        raise different_numbers(
            ["an unknown number" if n is None else n for n in numbers]
        )
    for reason in filter(None, reasons):
        raise different_data(reason)
    if all(fingerprints):
        odd = int(_first_different(tf.constant(fingerprints)))
        if odd:
            raise different_data(
                f"rank {odd} has different examples than rank 0"
            )
    return numbers


def fingerprint_rows(adapter: Any) -> list[float]:
    """Return a fingerprint of some rows of arrays; empty without arrays."""
    if not isinstance(adapter, compat.ArrayDataAdapter):
        return []
    rows = keras.tree.map_structure(_some_rows, adapter._inputs)
    arrays = compat.convert_to_sliceable(rows, target_backend="tensorflow")
    return [adapter._num_samples, *fingerprint(arrays).numpy().tolist()]


def _some_rows(array: Any) -> Structure:
    """Return some rows of an array, or all of one that cannot be sliced."""
    if hasattr(array, "__array__") and hasattr(array, "__getitem__"):
        return array[:: 1 + array.shape[0] // _ROWS]
    return array


def different_data(why: str) -> TowerError:
    """Return the error for ranks that were given different data."""
    return TowerError(f"the ranks were given different data: {why}. {_REMEDY}")


def different_numbers(numbers: Sequence[object]) -> TowerError:
    """Return the error for ranks with different numbers of batches."""
    of_ranks = rank_checks.describe_ranks(numbers)
    return different_data(f"numbers of batches differ ({of_ranks})")


def fingerprint(structure: Structure) -> tf.Tensor:
    """Return four numbers, nearly equal only if the values are nearly equal."""
    rows = [tf.zeros(SIZE, tf.float32)]
    for leaf in tf.nest.flatten(structure, expand_composites=True):
        # An accelerator would get a copy of an array in memory.
        with tf.device(compat.HOST):
            if leaf is not None and leaf.dtype != tf.variant:
                flat = tf.reshape(leaf, [-1])
                rows.append(_fingerprint_of(flat, len(rows)))
    return tf.add_n(rows)


def rounded_fingerprint(structure: Structure) -> tf.Tensor:
    """Return four integers; rounding of the values changes them by 1."""
    with tf.device(compat.HOST):
        exact = tf.cast(fingerprint(structure), tf.float64)
        return tf.cast(tf.round(exact / _TOLERANCE), tf.int64)


def _fingerprint_of(flat: tf.Tensor, number: int) -> tf.Tensor:
    count = tf.size(flat, tf.int64)
    flat = flat[:: 1 + count // _VALUES]
    if flat.dtype == tf.string:
        flat = tf.strings.to_hash_bucket_fast(flat, _PRIME)
    elif flat.dtype.is_complex:
        flat = tf.concat([tf.math.real(flat), tf.math.imag(flat)], 0)
    flat = tf.cast(flat, tf.float64)
    # A column of large numbers must not hide differences in other columns.
    flat = tf.math.asinh(tf.where(tf.math.is_finite(flat), flat, 1))
    norm = tf.norm(flat)
    # Each position has another weight, so that the order counts, too.
    index = tf.range(1, 1 + tf.size(flat, tf.int64)) + number
    weights = 2 / _PRIME * tf.cast(index**2 * _FACTORS % _PRIME, tf.float64) - 1
    sums = tf.math.divide_no_nan(tf.linalg.matvec(weights, flat), norm)
    sums = tf.unstack(sums, len(_FACTORS))
    numbers = [tf.cast(count, tf.float64), tf.math.log1p(norm), *sums]
    return tf.cast(tf.stack(numbers), tf.float32)


def _first_different(fingerprints: tf.Tensor) -> tf.Tensor:
    """Return the first rank whose fingerprint differs from rank 0's, or 0."""
    far = tf.abs(fingerprints - fingerprints[0]) > _TOLERANCE
    return tf.argmax(tf.reduce_any(far, 1))


def refuse_other_batch(
    transport: Transport, is_same: tf.Tensor, rounded: tf.Tensor
) -> list[tf.Operation]:
    """Return assertions that fail a step if ranks' global batches differ.

    The step that uses a batch compares it: a generator's output cannot be read
    twice, and a dataset may draw a new order.

    Args:
        transport: connects the ranks.
        is_same: whether all have the same batch, equally on all ranks.
        rounded: the rounded fingerprint of that of this rank.
    """

    def find() -> tf.Tensor:
        ranks = transport.all_gather(rounded[tf.newaxis], next_key("data"))
        return tf.argmax(tf.reduce_max(abs(ranks - ranks[0]), 1))

    odd = tf.cond(is_same, lambda: tf.zeros((), tf.int64), find)
    why = "rank {} has different examples in a batch than rank 0"
    return step_errors.assert_for_user(is_same, str(different_data(why)), [odd])


def check_results(transport: Transport, values: Structure) -> None:
    """Refuse results of an eager step that differ between ranks.

    Such a step is not traced: only its results show whether it is the same.
    """
    local = fingerprint(values)[tf.newaxis]
    odd = int(
        _first_different(transport.all_gather(local, next_key("results")))
    )
    if odd:
        raise TowerError(
            f"rank {odd} has other results than rank 0, after a step that ran "
            "eagerly on the same examples. Build and compile the model in "
            "the same way on every rank, run the same code, and give the "
            "random generators of Python and NumPy the same seed "
            "(keras.utils.set_random_seed)."
        )


def _why_order_varies(dataset: tf.data.Dataset) -> str | None:
    """Return why each rank would read a dataset in another order, or ""."""
    if dataset.options().deterministic is False:
        return "its options say deterministic=False"
    for part in parts_of(dataset):
        kind = type(part).__name__
        if kind == "_ShuffleDataset" and not any(
            tf.get_static_value(getattr(part, name, 1)) != 0
            for name in ("_seed", "_seed2")
        ):
            return "every rank shuffles it without a seed"
        is_unordered = getattr(part, "_deterministic", None) == "false"
        if is_unordered or compat.interleaves_in_any_order(part):
            return "a step of the dataset has deterministic=False"
    return None


def check_order(dataset: tf.data.Dataset) -> None:
    """Refuse data that each rank would read in another order."""
    reason = _why_order_varies(dataset)
    if reason:
        raise different_data(reason)


def check_shards(dataset: tf.data.Dataset) -> None:
    """Refuse shards that ranks take from different orders.

    Some examples would be in several of them, and others in none.
    """
    for part in parts_of(dataset):
        if type(part).__name__ != "_ShardDataset":
            continue
        reason = _why_order_varies(part)
        if reason and tf.get_static_value(part._num_shards) != 1:
            raise TowerError(
                "the ranks take their shards of different data: before "
                f"`shard`, {reason}. Do this after `shard`, or give shuffles "
                "the same seed on every rank."
            )


def parts_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset, and the datasets that it is made of."""
    yield dataset
    for parent in dataset._inputs():
        yield from parts_of(parent)
