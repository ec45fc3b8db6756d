"""Checks that all ranks read the same data, by fingerprints of it.

``epoch_iterator.py`` compares data before an epoch; ``fit/step/global_step.py``
compares batches in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.context import step_errors
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers
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
# About how many rows of arrays ranks compare.
_ROWS = 64
# About how many values of each tensor of a batch they compare, and how many
# real numbers of a batch they exchange if some differ.
_VALUES = 2**16
ROUNDING: Mapping[int, float] = {8: 2**-40, 4: 2**-20, 2: 2**-7, 1: 2**-2}
"""How far machines round differently, by the bytes of a real number."""
# When they compute a step, relative to the largest number of a column.
_ROUNDING_OF_RESULTS = 1e-4


class Fingerprint:
    """Tells whether values are those of other ranks.

    Args:
        structure: nested tensors.
        rounding: how far real numbers may differ, relative to the largest of
            their column; None: as machines compute the same data.

    Attributes:
        numbers: two 32-bit numbers, equal only for the same bits.
    """

    def __init__(self, structure: Structure, rounding: float | None = None):
        leaves = tf.nest.flatten(structure, expand_composites=True)
        self._leaves: list[tf.Tensor] = [
            tf.convert_to_tensor(leaf)
            for leaf in leaves
            if leaf is not None and leaf.dtype != tf.variant
        ]
        self._rounding = rounding
        # An accelerator would get a copy of an array in memory.
        with tf.device(compat.HOST):
            self.numbers: tf.Tensor = digest_of(self._leaves, whole=False)

    def sample(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return numbers to compare, and how far those of ranks may differ.

        There are always as many: ranks may have other shapes.
        """
        with tf.device(compat.HOST):
            exact = [t for t in self._leaves if not _is_real(t)]
            exact += [tf.shape(leaf) for leaf in self._leaves]
            values = [tf.cast(digest_of(exact, whole=False), tf.float64)]
            slacks = [tf.zeros(2, tf.float64)]
            for leaf in filter(_is_real, self._leaves):
                for part in _parts_of(leaf):
                    values.append(_some(part))
                    slacks.append(_some(self._slack_of(part, leaf.dtype)))
            return _padded(values), _padded(slacks)

    def _slack_of(self, part: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        sizes = tf.where(tf.math.is_finite(part), abs(part), 0)
        axes = tf.range(tf.maximum(tf.rank(part) - 1, 1))
        axes = axes[: tf.rank(part)]
        largest = tf.reduce_max(sizes, axes, keepdims=True)
        size = dtype.real_dtype.size
        rounding = self._rounding or ROUNDING[size]
        return tf.broadcast_to(rounding * largest, tf.shape(part))


def compare_data(
    peers: Peers, kind: str, adapter: Any, data: tf.data.Dataset, is_same: bool
) -> tuple[list[int | None], list[tf.TensorShape] | None]:
    """Compare the ranks' data.

    Args:
        peers: the ranks.
        kind: the method of Keras that reads them.
        adapter: Keras's adapter.
        data: the dataset.
        is_same: whether it must be the same on all ranks.

    Returns:
        The numbers of their batches, or None; and for each tensor of a batch
        the static shape that it has on all ranks, None: they have the same.

    Raises:
        TowerError: the ranks must have the same data, but do not.
    """
    where = f"begins to read the data of {kind}"
    varies = _why_order_varies(data) if is_same else None
    own = fingerprint_rows(adapter) if is_same else None
    digest = [] if own is None else own.numbers.numpy().tolist()
    leaves = tf.nest.flatten(data.element_spec)
    shapes = [_static_shape(leaf) for leaf in leaves]
    plan = adapter.num_batches, digest, varies, shapes
    plans = rank_checks.gather(peers, plan, where)
    numbers, fingerprints, reasons, specs = map(list, zip(*plans, strict=True))
    common = None
    if any(of_rank != specs[0] for of_rank in specs):
        common = [*map(_common_shape, zip(*specs, strict=False))]
    if not is_same:
        return numbers, common
    if len(set(numbers)) > 1:
        raise different_numbers(
            ["an unknown number" if n is None else n for n in numbers]
        )
    for reason in filter(None, reasons):
        raise different_data(reason)
    if own is not None and any(fingerprints[0] != f for f in fingerprints):
        odd = _first_far_eagerly(peers, own, where)
        if odd:
            raise different_data(
                f"rank {odd} has different examples than rank 0"
            )
    return numbers, common


def _static_shape(spec: Any) -> list[int | None] | None:
    """Return the static shape of a dense tensor; None: not even its rank."""
    is_known = isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None
    return spec.shape.as_list() if is_known else None


def _common_shape(ranks: Sequence[Any]) -> tf.TensorShape:
    """Return the static shape that a tensor has on all ranks."""
    first, *others = map(tf.TensorShape, ranks)
    for other in others:
        first = first.most_specific_compatible_shape(other)
    return first


def fingerprint_rows(adapter: Any) -> Fingerprint | None:
    """Return a fingerprint of some rows of arrays; None without arrays."""
    if not isinstance(adapter, compat.ArrayDataAdapter):
        return None
    rows = keras.tree.map_structure(_some_rows, adapter._inputs)
    arrays = compat.convert_to_sliceable(rows, target_backend="tensorflow")
    return Fingerprint([np.int64(adapter._num_samples), arrays])


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


def _is_real(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _parts_of(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return real numbers, or the two parts of complex ones."""
    parts = [tensor]
    if tensor.dtype.is_complex:
        parts = [tf.math.real(tensor), tf.math.imag(tensor)]
    return [tf.cast(part, tf.float64) for part in parts]


def _padded(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Join two numbers and as many of the others as ranks exchange."""
    rest = tf.concat([tf.zeros(0, tf.float64), *parts[1:]], 0)
    rest = rest[:: 1 + tf.size(rest) // _VALUES]
    rest = tf.pad(rest, [[0, _VALUES - tf.size(rest)]])
    return tf.ensure_shape(tf.concat([parts[0], rest], 0), [2 + _VALUES])


def _some(tensor: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    return flat[:: 1 + tf.size(flat, tf.int64) // _VALUES]


def digest_of(tensors: Sequence[tf.Tensor], whole: bool = True) -> tf.Tensor:
    """Return two 32-bit numbers of tensors, or of some of their values."""
    rows = [tf.zeros([1, 8], tf.uint8)]
    for tensor in tensors:
        rows.append(tf.fingerprint([tf.shape(tensor, tf.int64)]))
        flat = tf.reshape(tensor, [-1]) if whole else _some(tensor)
        rows.append(tf.fingerprint(flat[tf.newaxis]))
    digest = tf.reshape(tf.fingerprint(tf.concat(rows, 1)), [2, 4])
    return tf.cast(tf.bitcast(digest, tf.uint32), tf.int64)


def is_far(values: tf.Tensor, first: tf.Tensor, slack: tf.Tensor) -> tf.Tensor:
    """Whether some numbers are not about those of rank 0."""
    is_nan = tf.math.is_nan
    same = (values == first) | (is_nan(values) & is_nan(first))
    near = same | (abs(values - first) <= slack)
    return tf.reduce_any(tf.logical_not(near))


def first_far(
    transport: Transport, values: tf.Tensor, slack: tf.Tensor, key: str
) -> tf.Tensor:
    """Return the first rank that has other numbers than rank 0, or 0.

    Args:
        transport: connects the ranks.
        values: N numbers of this rank.
        slack: how far each may be from that of rank 0.
        key: the key of the collectives.
    """
    (first,) = transport.broadcast([values], f"{key}.first")
    far = tf.cast(is_far(values, first, slack), tf.int64)
    zero = tf.zeros((), tf.int64)
    row = tf.one_hot(transport.rank, transport.size, far, zero)
    return tf.argmax(transport.all_reduce([row], f"{key}.far")[0])


def _first_far_eagerly(peers: Peers, own: Fingerprint, where: str) -> int:
    """Do as ``first_far`` between steps, without a transport."""
    values, slack = own.sample()
    sent = values.numpy().tolist() if peers.rank == 0 else None
    first: Any = rank_checks.gather(peers, sent, where)[0]
    far = bool(is_far(values, tf.constant(first, tf.float64), slack))
    return int(np.argmax(rank_checks.gather(peers, far, where)))


def refuse_other_batch(odd: tf.Tensor) -> list[tf.Operation]:
    """Return assertions that fail a step if ranks' global batches differ.

    The step that uses a batch compares it: a generator's output cannot be read
    twice, and a dataset may draw a new order.

    Args:
        odd: the first rank that has another one than rank 0; 0: none.
    """
    why = "rank {} has different examples in a batch than rank 0"
    text = str(different_data(why))
    return step_errors.assert_for_user(odd == 0, text, [odd])


def check_results(transport: Transport, values: Structure) -> None:
    """Refuse results of an eager step that differ between ranks.

    Such a step is not traced: only its results show whether it is the same.
    """
    sample = Fingerprint(values, _ROUNDING_OF_RESULTS).sample()
    odd = int(first_far(transport, *sample, next_key("results")))
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
