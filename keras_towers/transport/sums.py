"""Every collective from one: the sum of a vector over the ranks.

What an engine that only sums is asked for besides: gathering is the sum of
vectors in which each rank has filled in its part, broadcasting the sum of the
root's vector and zeros. Bits are added as integers (``words``), so that values
arrive as they were sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.transport import plain

_SUMMED_AS = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.bool, tf.int8, tf.int16), tf.int32),
    **dict.fromkeys((tf.uint8, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}
DIFFERENT = "the ranks do not sum the same tensors"
# Tensors that are sent as one message, which the engine splits no further.
MESSAGE_BYTES = 4 * 2**20


class Sums(ABC):
    """The collectives of a ``Transport``, built from sums of vectors."""

    def __init__(self):
        self._functions: dict[tuple, Callable] = {}

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process, 0 to size - 1."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of processes."""

    @abstractmethod
    def _sum_known(
        self, vectors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum vectors of known lengths, each when it is ready.

        Args:
            vectors: of a native dtype, not empty; of equal lengths on all
                ranks.
        """

    @abstractmethod
    def _sum_unknown(self, vector: tf.Tensor, key: str) -> tf.Tensor:
        """Sum a vector whose length is known when it is there, maybe empty."""

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        if self.size == 1:
            return list(tensors)
        return self._traced("all_reduce", self._all_reduce, tensors, key)

    def all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        if self.size == 1:
            return tensor
        (gathered,) = self._traced(
            "all_gather",
            lambda tensors, key: [self._all_gather(tensors[0], key)],
            [tensor],
            key,
            rows=None,
        )
        return gathered

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        if self.size == 1:
            return tensor
        everything = self.all_gather(tensor, key)
        # [from, to, rows, ...]
        inner = tf.shape(tensor)[1:]
        split = tf.reshape(
            everything, tf.concat([[self.size, self.size, -1], inner], 0)
        )
        mine = tf.reshape(split[:, self.rank], tf.shape(tensor))
        return tf.ensure_shape(mine, tensor.shape)

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        if self.size == 1:
            return list(tensors)
        return self._traced(
            f"broadcast.{root}",
            lambda tensors, key: self._broadcast(tensors, key, root),
            tensors,
            f"{key}.from{root}",
        )

    def gather_objects(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        return plain.gather(self.all_gather, value)

    def _all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        sums: dict[int, tf.Tensor] = {}
        cast = [
            tf.cast(t, _SUMMED_AS.get(t.dtype, t.dtype))
            for t in map(tf.convert_to_tensor, tensors)
        ]
        groups = messages(cast)
        vectors = [
            tf.concat([tf.reshape(cast[i], [-1]) for i in group], 0)
            for group in groups
        ]
        totals = self._sum_known(vectors, key) if vectors else []
        for group, total in zip(groups, totals, strict=True):
            lengths = [_elements(cast[i]) or 0 for i in group]
            parts = tf.split(total, lengths)
            sums.update(zip(group, parts, strict=True))
        for i, tensor in enumerate(cast):
            if _elements(tensor) is None:
                flat = tf.reshape(tensor, [-1])
                sums[i] = self._sum_unknown(flat, f"{key}.{i}")
        return [
            tf.cast(tf.reshape(sums.get(i, t), tf.shape(t)), tensors[i].dtype)
            for i, t in enumerate(cast)
        ]

    def _all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        rows = tf.shape(tensor)[0]
        place = tf.one_hot(self.rank, self.size, dtype=tf.int32)
        (counts,) = self._sum_known([place * rows], f"{key}.rows")
        inner = tf.shape(tensor)[1:]
        each = tf.reduce_prod(inner) * words_per_element(tensor.dtype)
        before = tf.reduce_sum(counts[: self.rank])
        after = tf.reduce_sum(counts[self.rank + 1 :])
        padding = tf.stack([[before * each, after * each]])
        mine = tf.pad(to_words(tensor), padding)
        everyone = self._sum_unknown(mine, f"{key}.words")
        shape = tf.concat([[before + rows + after], inner], 0)
        gathered = from_words(everyone, tensor.dtype, shape)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def _broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        words = [to_words(tensor) for tensor in tensors]
        vector = tf.concat([*words, tf.zeros([0], WORD)], 0)
        if self.rank != root:
            vector = tf.zeros_like(vector)
        vector = self._sum_unknown(vector, key)
        parts = (
            tf.split(vector, [tf.size(part) for part in words], num=len(words))
            if words
            else []
        )
        received = []
        for tensor, part in zip(tensors, parts, strict=True):
            value = from_words(part, tensor.dtype, tf.shape(tensor))
            received.append(tf.ensure_shape(value, tensor.shape))
        return received

    def _traced(
        self,
        what: str,
        collective: Callable[[Sequence[tf.Tensor], str], list[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        key: str,
        rows: int | None = -1,
    ) -> list[tf.Tensor]:
        """Run a collective, eagerly too, as part of a traced function.

        Args:
            rows: None if the first dimensions differ from call to call.
        """
        if not tf.executing_eagerly():
            return collective(list(tensors), key)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        specs = [
            tf.TensorSpec(
                [None, *t.shape[1:]] if rows is None else t.shape, t.dtype
            )
            for t in tensors
        ]
        form = what, key, *specs
        if form not in self._functions:
            # TensorFlow takes these for one tf.function that is traced again
            # and again, and warns of it, where they are not concrete.
            function = tf.function(
                lambda tensors: collective(tensors, key), autograph=False
            )
            self._functions[form] = function.get_concrete_function(specs)
        try:
            return self._functions[form](tensors)
        except tf.errors.InvalidArgumentError as error:
            if DIFFERENT not in str(error):
                raise
            # The next try, of other tensors maybe, is to be compared again.
            del self._functions[form]
            raise TowerError(_told(error)) from None

    def _refused(
        self, vectors: Sequence[tf.Tensor], why: str
    ) -> list[tf.Tensor]:
        """Vectors that raise an error when they are asked for."""
        # Not now: a step that compares the gradients of the ranks does not ask,
        # and knows better what differs.
        with tf.control_dependencies([tf.debugging.Assert(False, [why])]):
            return [tf.identity(vector) for vector in vectors]


def messages(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Group tensors of known shapes that are sent as one vector each.

    Args:
        tensors: N tensors; those of unknown shape and empty ones are left out.

    Returns:
        Groups of indices; the tensors of a group have one dtype, and together
        ``MESSAGE_BYTES`` or more only if the last one made them so.
    """
    # Few messages cost less than many. The backward pass computes the last
    # variable's gradient first, so the groups go from last to first.
    groups: list[list[int]] = []
    open_groups: dict[tf.DType, tuple[list[int], int]] = {}
    for index in reversed(range(len(tensors))):
        elements = _elements(tensors[index])
        if not elements:
            continue
        dtype = tensors[index].dtype
        members, size = open_groups.pop(dtype, ([], 0))
        if not members:
            groups.append(members)
        members.append(index)
        size += elements * dtype.size
        if size < MESSAGE_BYTES:
            open_groups[dtype] = members, size
    return groups


def _told(error: tf.errors.OpError) -> str:
    """The message of an assertion, without what TensorFlow adds."""
    text = error.message[error.message.index(DIFFERENT) :]
    return text.split("'\n", 1)[0].split("\n\t", 1)[0].rstrip("]'\n ")


def _elements(tensor: tf.Tensor) -> int | None:
    return tensor.shape.num_elements()


WORD = tf.int32
"""The dtype of a word: the integer that every engine sums."""


def words_per_element(dtype: tf.DType) -> int:
    """The number of words of one element; small elements take one each."""
    return max(1, dtype.size // WORD.size)


def to_words(tensor: tf.Tensor) -> tf.Tensor:
    """The elements of a tensor, bit by bit.

    Args:
        tensor: of any shape, and any dtype of fixed size.

    Returns:
        int32 [elements * words_per_element(dtype)].
    """
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, WORD)
    elif tensor.dtype.size < WORD.size:
        tensor = tf.cast(tf.bitcast(tensor, _small(tensor.dtype)), WORD)
    elif tensor.dtype != WORD:
        tensor = tf.bitcast(tensor, WORD)
    return tf.reshape(tensor, [-1])


def from_words(
    words: tf.Tensor, dtype: tf.DType, shape: tf.Tensor
) -> tf.Tensor:
    """The tensor that ``to_words`` was given.

    Args:
        words: int32 [elements * words_per_element(dtype)].
        shape: of the tensor, int32 [rank].
    """
    if dtype == tf.bool:
        tensor = tf.cast(words, dtype)
    elif dtype.size < WORD.size:
        tensor = tf.bitcast(tf.cast(words, _small(dtype)), dtype)
    elif dtype == WORD:
        tensor = words
    else:
        each = words_per_element(dtype)
        rows = tf.reshape(words, [-1, each]) if each > 1 else words
        tensor = tf.bitcast(rows, dtype)
    return tf.reshape(tensor, shape)


def _small(dtype: tf.DType) -> tf.DType:
    return tf.uint8 if dtype.size == 1 else tf.uint16
