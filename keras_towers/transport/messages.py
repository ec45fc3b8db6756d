"""Encodes tensors for ranks to send, in few messages.

Engines support few dtypes, and each message has a cost. So tensors are sent as
words of their bits, or summed in a dtype that engines can sum, and small
tensors of a dtype share a message.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers.foundation.errors import TowerError

Shape: TypeAlias = "tf.TensorShape | Sequence[int | None]"

WORD: tf.DType = tf.int32
"""The integer that every engine sends and sums."""

_SUMMED_AS = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys(
        (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
    ),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}

MESSAGE_BYTES: int = 4 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows that each of K members has of a tensor, or gets.

    Attributes:
        axis: the axis of the rows.
        counts: the numbers of rows of the members, in their order: whole
            numbers, or scalar tensors if they are not known before a step; of
            what is gathered they may be missing then.
    """

    axis: int
    counts: Sequence[int | tf.Tensor] = ()

    @property
    def is_known(self) -> bool:
        """Whether the numbers are known before a step."""
        is_number = [isinstance(count, int) for count in self.counts]
        return bool(is_number) and all(is_number)

    def shapes(self, shape: Shape) -> list[list[Any]]:
        """Return the shapes of the members' rows, given that of the whole."""
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        return [[*before, count, *after] for count in self.counts]

    def whole_shape(self, shape: tf.TensorShape) -> tf.TensorShape:
        """Return the shape of the whole, given that of a member's rows."""
        size = sum(self.counts) if self.is_known else None
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        return before.concatenate([size]).concatenate(after)

    def split(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return each member's rows of a whole."""
        counts = list(self.counts)
        return tf.split(tensor, counts, self.axis, num=len(counts))

    def follow_in_memory(self, shape: Shape) -> bool:
        """Whether the rows of one member follow those of another in memory."""
        before: Any = shape[: self.axis]
        return math.prod(before) == 1


_MOST_DIMENSIONS = 8
HEADER: int = 2 + _MOST_DIMENSIONS
"""The numbers of a tensor's ``header``."""


def bytes_of(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bytes of each element; if several, as a last dimension."""
    if tensor.dtype == tf.string:
        raise TowerError(
            "tensors of dtype string cannot be sent to other ranks: send "
            "numbers or truth values."
        )
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.uint8)
    return tf.bitcast(tensor, tf.uint8)


def tensor_of(octets: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo ``bytes_of``."""
    if dtype == tf.bool:
        return tf.cast(octets, tf.bool)
    return tf.bitcast(octets, dtype)


def words_of(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor's bits as words [N]; the last may end with zeros."""
    if _is_of_words(tensor.dtype):
        return tf.reshape(tf.bitcast(tensor, WORD), [-1])
    octets = tf.reshape(bytes_of(tensor), [-1])
    missing = -tf.size(octets, tf.int64) % WORD.size
    octets = tf.pad(octets, [[0, missing]])
    return tf.bitcast(tf.reshape(octets, [-1, WORD.size]), WORD)


def _is_of_words(dtype: tf.DType) -> bool:
    return dtype in (tf.float32, tf.int32, tf.uint32)


def with_rows(tensor: tf.Tensor, number: int) -> tf.Tensor:
    """Return a tensor padded with zeros to a number of rows."""
    if tensor.shape[0] == number:
        return tensor
    missing = number - tf.shape(tensor)[0]
    before = [0] * tensor.shape.rank
    after = [missing, *before[1:]]
    padded = tf.pad(tensor, tf.stack([before, after], 1))
    return tf.ensure_shape(padded, [number, *tensor.shape[1:]])


def with_rows_each(tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
    """Return the rows of each rank, padded to the same number.

    Args:
        tensor: the rows of all ranks.
        counts: the number of rows of each.
    """
    most = max(counts)
    if min(counts) == most:
        return tensor
    return tf.concat([with_rows(p, most) for p in tf.split(tensor, counts)], 0)


def number_of_words(dtype: tf.DType, shape: tf.Tensor) -> tf.Tensor:
    """Return how many words ``words_of`` returns for a shape [..., rank]."""
    sizes = tf.reduce_prod(tf.cast(shape, tf.int64), -1) * dtype.size
    return -(-sizes // WORD.size)


def from_words(words: tf.Tensor, dtype: tf.DType, shape: Any) -> tf.Tensor:
    """Undo ``words_of``; further words are ignored."""
    if _is_of_words(dtype):
        own = words[: tf.reduce_prod(shape)]
        return tf.reshape(tf.bitcast(own, dtype), shape)
    shape = tf.cast(shape, tf.int64)
    octets = tf.reshape(tf.bitcast(words, tf.uint8), [-1])
    octets = octets[: tf.reduce_prod(shape) * dtype.size]
    if dtype.size > 1:
        octets = tf.reshape(octets, [-1, dtype.size])
    return tf.reshape(tensor_of(octets, dtype), shape)


def header(tensor: tf.Tensor, key: str) -> tf.Tensor:
    """Return the dtype, number of dimensions and shape as words [HEADER].

    Raises:
        TowerError: the number of dimensions is not known, is 0, or too large.
    """
    dimensions = tensor.shape.rank
    if not dimensions or dimensions > _MOST_DIMENSIONS:
        raise TowerError(
            f"the collective {key!r} got a tensor of shape {tensor.shape}: "
            f"give one with 1 to {_MOST_DIMENSIONS} dimensions."
        )
    kind = tf.constant([tensor.dtype.as_datatype_enum, dimensions])
    unused = tf.zeros([_MOST_DIMENSIONS - dimensions], tf.int32)
    return tf.concat([kind, tf.shape(tensor), unused], 0)


def shapes_of_ranks(
    headers: tf.Tensor, tensor: tf.Tensor, key: str
) -> tf.Tensor:
    """Return shapes [ranks, dimensions] from headers [ranks, HEADER].

    Raises an error at run time if tensors differ in more than their rows.
    """
    kinds, shapes = tf.split(headers, [2, _MOST_DIMENSIONS], axis=1)
    same = tf.reduce_all(kinds == kinds[:1]) & tf.reduce_all(
        shapes[:, 1:] == shapes[:1, 1:]
    )
    message = (
        f"the ranks' tensors for the collective {key!r} differ in dtype or "
        "shape, in more than the first dimension"
    )
    check = tf.debugging.Assert(same, [message, kinds, shapes])
    with tf.control_dependencies([check]):
        return tf.identity(shapes[:, : tensor.shape.rank])


def summable(tensor: tf.Tensor) -> tf.Tensor:
    """Convert a tensor to a dtype that engines can sum."""
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    return tf.cast(tensor, _SUMMED_AS.get(tensor.dtype, tensor.dtype))


def summed(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo ``summable``: convert a sum back to the dtype of the tensor."""
    if dtype.is_complex:
        return tf.complex(*tf.unstack(tensor, axis=-1))
    return tf.cast(tensor, dtype)


def send_packed(
    tensors: Sequence[tf.Tensor],
    send: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
    limit: int = MESSAGE_BYTES,
) -> list[tf.Tensor]:
    """Send N tensors: small ones of a dtype together, empty ones not at all.

    Args:
        send: sends M tensors, and returns M tensors of the same shapes.
        limit: the largest size in bytes of a message with several tensors.
    """
    groups = group_by_bytes(tensors, limit)
    if not groups:
        return list(tensors)
    packed = pack(tensors, groups, joined_group)
    return unpack(send(packed), groups, tensors, divided_as(tensors))


def pack(
    tensors: Sequence[Any],
    groups: Sequence[Sequence[int]],
    join: Callable[..., tf.Tensor],
) -> list[Any]:
    """Join the tensors of each group; a single tensor is not copied."""
    return [
        join(tensors, group) if len(group) > 1 else tensors[group[0]]
        for group in groups
    ]


def unpack(
    packed: Sequence[Any],
    groups: Sequence[Sequence[int]],
    tensors: Sequence[Any],
    divide: Callable[..., list[tf.Tensor]],
) -> list[Any]:
    """Undo ``pack``; tensors in no group are returned as they are."""
    results = list(tensors)
    for group, whole in zip(groups, packed, strict=True):
        parts = divide(whole, group) if len(group) > 1 else [whole]
        for i, part in zip(group, parts, strict=True):
            results[i] = part
    return results


def joined_group(
    tensors: Sequence[tf.Tensor], group: Sequence[int]
) -> tf.Tensor:
    """Return the elements of the tensors of a group as one vector."""
    return joined(tensors[i] for i in group)


def divided_as(like: Any) -> Callable[..., list[tf.Tensor]]:
    """Return a function that undoes ``joined_group``, for tensors like these.

    What it gets besides a vector and a group does not matter.
    """
    return lambda whole, group, **_: divided(
        whole, [like[i].shape for i in group]
    )


def joined(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return the elements of tensors of a dtype as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def divided(vector: tf.Tensor, shapes: Sequence[Shape]) -> list[tf.Tensor]:
    """Undo ``joined``: return tensors of these static shapes."""
    sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
    return list(map(tf.reshape, tf.split(vector, sizes), shapes))


def joined_rows(
    wholes: Sequence[tf.Tensor], rows: Sequence[Rows]
) -> tuple[tf.Tensor, list[int]]:
    """Return N tensors of a dtype as one vector: a member's rows, the next's.

    Args:
        wholes: the tensors, of known shapes.
        rows: for each of them, the rows of K members.

    Returns:
        The vector, and how many of its elements are of each member.
    """
    shapes = [whole.shape.as_list() for whole in wholes]
    sizes = elements_of_members(shapes, rows)
    if len(wholes) == 1 and rows[0].follow_in_memory(shapes[0]):
        # It takes no copy.
        return tf.reshape(wholes[0], [-1]), sizes
    parts = [own.split(whole) for own, whole in zip(rows, wholes, strict=True)]
    vectors = map(joined, zip(*parts, strict=True))
    return tf.concat(list(vectors), 0), sizes


def wholes_of(
    vector: tf.Tensor, shapes: Sequence[Shape], rows: Sequence[Rows]
) -> list[tf.Tensor]:
    """Undo ``joined_rows``: return N tensors of these shapes."""
    if len(shapes) == 1 and rows[0].follow_in_memory(shapes[0]):
        return [tf.reshape(vector, shapes[0])]
    of_members = tf.split(vector, elements_of_members(shapes, rows))
    of_tensors = [
        own.shapes(shape) for own, shape in zip(rows, shapes, strict=True)
    ]
    parts = map(divided, of_members, zip(*of_tensors, strict=True))
    return [
        tf.concat(list(of_tensor), own.axis)
        for own, of_tensor in zip(rows, zip(*parts, strict=True), strict=True)
    ]


def elements_of_members(
    shapes: Sequence[Shape], rows: Sequence[Rows]
) -> list[int]:
    """Return how many elements of N tensors are in the rows of each member."""
    sizes = [
        map(math.prod, own.shapes(shape))
        for own, shape in zip(rows, shapes, strict=True)
    ]
    return list(map(sum, zip(*sizes, strict=True)))


def group_by_bytes(
    tensors: Sequence[tf.Tensor | tf.TensorSpec], limit: int = MESSAGE_BYTES
) -> list[list[int]]:
    """Group the non-empty tensors by message.

    The backward pass computes the last gradient first, so the groups go from
    last to first: one is sent while the next is computed.
    """
    groups: list[list[int]] = []
    still_open: dict[tf.DType, tuple[list[int], int]] = {}
    for i in reversed(range(len(tensors))):
        elements = tensors[i].shape.num_elements()
        if elements == 0:
            continue
        size = (elements or 0) * tensors[i].dtype.size
        if elements is None or size >= limit:
            groups.append([i])
            continue
        members, filled = still_open.get(tensors[i].dtype, ([], 0))
        if not members or filled + size > limit:
            members, filled = [], 0
            groups.append(members)
        members.append(i)
        still_open[tensors[i].dtype] = members, filled + size
    return groups
