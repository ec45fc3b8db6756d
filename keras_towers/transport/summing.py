"""Every collective from one: the sum of a vector over the ranks.

What an engine that only sums is asked for besides: gathering is the sum of
vectors in which each rank has filled in its part, broadcasting the sum of the
root's vector and zeros. Bits are added as integers (``words``), so that values
arrive as they were sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.transport.engine import EngineTransport
from keras_towers.transport.messages import packed

DIFFERENT = "the ranks do not sum the same tensors"


class SummingTransport(EngineTransport):
    """The collectives of a ``Transport``, built from sums of vectors."""

    carries: Collection[tf.DType] | None = None

    @abstractmethod
    def _sum_known(
        self, vectors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum vectors of lengths that all ranks know, each when it is ready."""

    @abstractmethod
    def _sum_unknown(self, vector: tf.Tensor, key: str) -> tf.Tensor:
        """Sum a vector whose length is known when it is there, maybe empty."""

    def all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        (gathered,) = self._traced(
            f"all_gather.{key}",
            lambda tensors: [self._all_gather(tensors[0], key)],
            [tensor],
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

    def _sum(self, tensors: Sequence[tf.Tensor], key: str) -> list[tf.Tensor]:
        return packed(tensors, lambda vectors: self._sum_each(vectors, key))

    def _sum_each(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        known = [v for v in flat if v.shape.num_elements() is not None]
        sums = iter(self._sum_known(known, key) if known else [])
        return [
            tf.reshape(
                self._sum_unknown(vector, f"{key}.{number}")
                if vector.shape.num_elements() is None
                else next(sums),
                tf.shape(tensor),
            )
            for number, (vector, tensor) in enumerate(
                zip(flat, tensors, strict=True)
            )
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

    def _send(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        words = [to_words(tensor) for tensor in tensors]
        vector = tf.concat(words, 0)
        if self.rank != root:
            vector = tf.zeros_like(vector)
        vector = self._sum_unknown(vector, key)
        sizes = [tf.size(part) for part in words]
        received = []
        for tensor, part in zip(
            tensors, tf.split(vector, sizes, num=len(words)), strict=True
        ):
            value = from_words(part, tensor.dtype, tf.shape(tensor))
            received.append(tf.ensure_shape(value, tensor.shape))
        return received

    def _traced(
        self,
        what: str,
        collective: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        rows: int | None = -1,
    ) -> list[tf.Tensor]:
        if self.size == 1:
            return list(tensors)
        known = set(self._functions)
        try:
            return super()._traced(what, collective, tensors, rows)
        except tf.errors.InvalidArgumentError as error:
            if DIFFERENT not in str(error):
                raise
            # The next try, of other tensors maybe, is to be compared again.
            for form in set(self._functions) - known:
                del self._functions[form]
            # Without what TensorFlow adds to the message of an assertion.
            text = error.message[error.message.index(DIFFERENT) :]
            text = text.split("'\n", 1)[0].split("\n\t", 1)[0]
            raise TowerError(text.rstrip("]'\n ")) from None


WORD = tf.int32
"""The dtype of a word: the integer that every engine sums."""


def words_per_element(dtype: tf.DType) -> int:
    """The number of words of one element; small elements take one each."""
    return max(1, dtype.size // WORD.size)


def to_words(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor's bits: int32 [elements * words_per_element]."""
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
    """Return the tensor of ``shape`` that ``to_words`` was given."""
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
