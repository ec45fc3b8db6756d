"""TensorFlow's collective operations as a transport.

Between hosts they run over TensorFlow's own gRPC servers: a ring for CPUs
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009), NCCL for GPUs. One device of each rank takes part.

TensorFlow matches what ranks send by two numbers: a group of devices, and an
instance in it. The shape and dtype of an instance are fixed when it first runs;
another shape under the same number ends all collectives of the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from keras_towers.engines.runtime.tensorflow_task import Task
from keras_towers.errors import TowerError
from keras_towers.rendezvous import watch
from keras_towers.transport.engine_transport import EngineTransport
from keras_towers.transport.messages import (
    from_words,
    number_of_words,
    packed,
    words_of,
)

# Keys of groups of collectives: those whose size is part of their own key; the
# same over NCCL, since a group has one kind of device; and those of the first
# of _PADDED_SIZES. The other padded sizes have the keys that follow.
_FIXED, _OVER_NCCL, _FIRST_PADDED = 1, 2, 3

# Numbers of words that vectors of unknown size are padded to. Such collectives
# have the same instance whatever their size, and the group tells them apart.
# With more numbers there would be more groups, with fewer more padding. No size
# is 0: TensorFlow's gather of nothing ends the process.
_PADDED_SIZES: tuple[int, ...] = tuple(
    (4 + part) * 2**octave for octave in range(2, 38) for part in range(4)
)

_MOST_DIMENSIONS = 8
# Sums of so few bytes are made of what all ranks have: a ring that gathers
# takes half as many messages, one after another, as one that sums.
_SMALL_BYTES = 2**15
# A header holds this many words; smaller tensors need no extra message.
_HEADER_WORDS = 12


# TensorFlow's numbers are those of the process, however many strategies there
# are.
_texts: dict[int, str] = {}


def instance_key(*parts: object) -> int:
    """Return the number of a collective, 0 to 2**31 - 1, equal on all ranks."""
    text = " ".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    number = int.from_bytes(digest) >> 1
    other = _texts.setdefault(number, text)
    if other != text:
        raise TowerError(
            f"the collectives {other!r} and {text!r} have the same number, "
            f"{number}, by chance. Change the name or the shape of either."
        )
    return number


class CollectiveTransport(EngineTransport):
    """TensorFlow's collectives as a ``keras_towers.transport.Transport``.

    Args:
        gpu: the device that sums over NCCL, such as ``"/device:GPU:0"``; None
            to send everything from the host.
    """

    name = "TensorFlow"

    def __init__(self, task: Task, gpu: str | None = None):
        place = task.cluster
        super().__init__(
            SimpleNamespace(
                rank=lambda: place.rank,
                size=lambda: place.size,
                local_rank=lambda: place.local_rank,
                local_size=lambda: place.local_size,
            )
        )
        self.task: Task = task
        self._gpu = gpu
        self._tokens: dict[str, tf.Tensor] = {}
        watch.start_watch(self.rank, self.size)

    @property
    def sums_float16(self) -> bool:
        return self._gpu is not None

    def _sum(self, tensors: Sequence[tf.Tensor], key: str) -> list[tf.Tensor]:
        # Eagerly, each operation would take as long as a small message.
        return packed(
            tensors,
            lambda vectors: [
                self._all_reduce_one(vector, f"{key}.{n}")
                for n, vector in enumerate(vectors)
            ],
        )

    def _all_reduce_one(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        if not tensor.shape.is_fully_defined():
            # Its size is not known before all ranks have told it.
            gathered = self._gather(tensor[tf.newaxis], f"{key}.any")
            return tf.reduce_sum(gathered, 0)
        form = _form(tensor)
        floats = tensor.dtype in (tf.float16, tf.float32, tf.float64)
        over_nccl = self._gpu is not None and floats
        bytes_ = tensor.shape.num_elements() * tensor.dtype.size
        if not over_nccl and bytes_ <= _SMALL_BYTES:
            number = instance_key(key, "each", form)
            gathered = self._rows(tf.reshape(tensor, [-1]), number)
            return tf.reshape(tf.reduce_sum(gathered, 0), tensor.shape)
        number = instance_key(key, "sum", form)
        with tf.device(self._gpu if over_nccl else self.task.host):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                **self._options(number, _FIXED, over_nccl),
                merge_op="Add",
                final_op="Id",
            )

    def _gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        words = words_of(tensor)
        shapes, heads = self._announce(tensor, words, key)
        longest = tf.reduce_max(number_of_words(tensor.dtype, shapes))

        def everything() -> tf.Tensor:
            sizes = tf.constant(_PADDED_SIZES, tf.int64)
            step = tf.searchsorted(sizes, longest[tf.newaxis])[0]
            size = tf.gather(sizes, step)
            padded = tf.pad(words, [[0, size - tf.size(words, tf.int64)]])
            number = instance_key(key, "all")
            return self._rows(padded, number, _FIRST_PADDED + step)

        rows = tf.cond(longest <= _HEADER_WORDS, lambda: heads, everything)
        parts = [
            from_words(rows[rank], tensor.dtype, shapes[rank])
            for rank in range(self.size)
        ]
        return tf.concat(parts, 0)

    def _exchange(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        if not tensor.shape.is_fully_defined():
            return super()._exchange(tensor, key)
        parts = tf.split(tensor, self.size)
        rows = tf.stack([words_of(part) for part in parts])
        number = instance_key(key, "swap", _form(tensor))
        with tf.device(self.task.host):
            swapped = tf.raw_ops.CollectiveAllToAllV2(
                input=rows, **self._options(number, _FIXED)
            )
        received = [
            from_words(row, tensor.dtype, parts[0].shape)
            for row in tf.unstack(swapped, num=self.size)
        ]
        return tf.concat(received, 0)

    def _broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        # A gather would take as many words of all ranks as of the root.
        words = [words_of(tensor) for tensor in tensors]
        if self.rank != root:
            words = [tf.zeros_like(vector) for vector in words]
        return [
            from_words(vector, tensor.dtype, tf.shape(tensor))
            for vector, tensor in zip(
                self._sum(words, key), tensors, strict=True
            )
        ]

    def _announce(
        self, tensor: tf.Tensor, words: tf.Tensor, key: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchange the shapes of the ranks' tensors, which may differ in rows.

        Returns:
            As rows, the shape of each rank's tensor and its first words.
        """
        dimensions = tensor.shape.rank
        if not dimensions or dimensions > _MOST_DIMENSIONS:
            raise TowerError(
                f"the collective {key!r} got a tensor of shape "
                f"{tensor.shape}: the number of dimensions has to be known, "
                f"and 1 to {_MOST_DIMENSIONS}."
            )
        kind = tf.constant([tensor.dtype.as_datatype_enum, dimensions])
        unused = tf.zeros([_MOST_DIMENSIONS - dimensions], tf.int32)
        first = words[:_HEADER_WORDS]
        first = tf.pad(first, [[0, _HEADER_WORDS - tf.size(first)]])
        head = tf.concat([kind, tf.shape(tensor), unused, first], 0)
        heads = self._rows(head, instance_key(key, "head"))
        kinds, shapes, heads = tf.split(
            heads, [2, _MOST_DIMENSIONS, _HEADER_WORDS], axis=1
        )
        check = tf.debugging.Assert(
            tf.reduce_all(kinds == kind)
            & tf.reduce_all(shapes[:, 1:] == shapes[:1, 1:]),
            [
                f"the ranks' tensors for the collective {key!r} differ in "
                "dtype or shape, in more than the first dimension",
                kinds,
                shapes,
            ],
        )
        with tf.control_dependencies([check]):
            return shapes[:, :dimensions], tf.identity(heads)

    def _rows(
        self, vector: tf.Tensor, number: int, group: tf.Tensor | int = _FIXED
    ) -> tf.Tensor:
        """Gather vectors of N elements as a matrix with one row per rank."""
        with tf.device(self.task.host):
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=vector, **self._options(number, group)
            )
        return tf.reshape(gathered, [self.size, -1])

    def _options(
        self, number: int, group: tf.Tensor | int, over_nccl: bool = False
    ) -> dict[str, Any]:
        """The arguments of all operations.

        TensorFlow would run them one by one, in the order of the program, and
        wait forever where that differs between ranks. With tokens it keeps
        those in order that have the same, which NCCL needs.
        """
        token = "nccl" if over_nccl else str(number)
        if token not in self._tokens:
            place = self._gpu if over_nccl else self.task.host
            with tf.init_scope(), tf.device(place):
                self._tokens[token] = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32, shape=[], shared_name=f"kt.token.{token}"
                )
        return {
            "group_size": self.size,
            "group_key": _OVER_NCCL if over_nccl else group,
            "instance_key": number,
            "ordering_token": [self._tokens[token]],
            "communication_hint": "nccl" if over_nccl else "ring",
        }


def _form(tensor: tf.Tensor) -> str:
    """Return a tensor's dtype and shape, which are part of its key."""
    return f"{tensor.dtype.name} {tensor.shape.as_list()}"
