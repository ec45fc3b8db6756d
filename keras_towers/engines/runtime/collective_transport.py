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
from typing import Any

import tensorflow as tf

from keras_towers.engines.runtime.tensorflow_task import Task, unreachable
from keras_towers.errors import TowerError
from keras_towers.rendezvous import watch
from keras_towers.transport.engine_transport import EngineTransport
from keras_towers.transport.messages import (
    carried,
    packed,
    received,
)

# Keys of groups of collectives: those whose size is part of their own key; the
# same over NCCL, since a group has one kind of device; and those of the first
# of _PADDED_SIZES. The other padded sizes have the keys that follow.
_FIXED, _OVER_NCCL, _FIRST_PADDED = 1, 2, 3

# Numbers of elements that those of unknown size are padded to. Such collectives
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
_HEADER_WORDS = 6


class InstanceKeys:
    """Numbers that are equal on all ranks, whatever the order of requests."""

    def __init__(self):
        self._texts: dict[int, str] = {}

    def number(self, *parts: object) -> int:
        """Return the instance of a collective, 0 to 2**31 - 1."""
        text = " ".join(map(str, parts))
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        number = int.from_bytes(digest) >> 1
        other = self._texts.setdefault(number, text)
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

    # TensorFlow's numbers are those of the process, however many strategies
    # there are.
    _keys = InstanceKeys()

    def __init__(self, task: Task, gpu: str | None = None):
        super().__init__(task.cluster)
        self._task = task
        self._gpu = gpu
        self._tokens: dict[str, tf.Tensor] = {}
        watch.watch_over(self.rank, self.size)

    @property
    def rank(self) -> int:
        return self.engine.rank

    @property
    def size(self) -> int:
        return self.engine.size

    @property
    def local_rank(self) -> int:
        return self.engine.local_rank

    @property
    def local_size(self) -> int:
        return self.engine.local_size

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
            gathered = self.all_gather(tensor[tf.newaxis], f"{key}.any")
            return tf.ensure_shape(tf.reduce_sum(gathered, 0), tensor.shape)
        form = _dtype_and_shape(tensor, key)
        floats = tensor.dtype in (tf.float16, tf.float32, tf.float64)
        over_nccl = self._gpu is not None and floats
        bytes_ = tensor.shape.num_elements() * tensor.dtype.size
        if not over_nccl and bytes_ <= _SMALL_BYTES:
            number = self._keys.number(key, "each", form)
            gathered = self._gather(tf.reshape(tensor, [-1]), number)
            return tf.reshape(tf.reduce_sum(gathered, 0), tensor.shape)
        number = self._keys.number(key, "sum", form)
        with tf.device(self._gpu if over_nccl else self._task.host):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                **self._options(number, _FIXED, over_nccl),
                merge_op="Add",
                final_op="Id",
            )

    def all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        sent = carried(tf.reshape(tensor, [-1]))
        shapes, heads = self._announce(tensor, sent, key)
        counts = tf.reduce_prod(shapes, axis=1)
        widest = tf.reduce_max(counts)

        def everything() -> tf.Tensor:
            padded, group = _padded(sent, widest)
            number = self._keys.number(key, "all", sent.dtype.name)
            return self._gather(padded, number, group)

        room = _HEADER_WORDS * tf.int64.size // sent.dtype.size
        rows = tf.cond(widest <= room, lambda: heads, everything)
        whole = tf.concat([rows[r, : counts[r]] for r in range(self.size)], 0)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], shapes[0, 1:]], 0)
        gathered = tf.reshape(received(whole, tensor.dtype), shape)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        sent = carried(tf.reshape(tensor, [-1]))
        shapes, _ = self._announce(tensor, sent, key)
        check = tf.debugging.Assert(
            tf.reduce_all(shapes == shapes[:1]),
            ["the ranks' tensors differ in shape", shapes],
        )
        with tf.control_dependencies(_control_inputs(check)):
            each = tf.reduce_prod(shapes[0]) // self.size
        padded, group = _padded(tf.reshape(sent, [self.size, -1]), each)
        number = self._keys.number(key, "swap", sent.dtype.name)
        with tf.device(self._task.host):
            swapped = tf.raw_ops.CollectiveAllToAllV2(
                input=padded, **self._options(number, group)
            )
        parts = received(tf.reshape(swapped[:, :each], [-1]), tensor.dtype)
        return tf.reshape(parts, tf.shape(tensor))

    def _send(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        def send(tensor: tf.Tensor, key: str) -> tf.Tensor:
            number = self._keys.number(key, _dtype_and_shape(tensor, key))
            options = self._options(number, _FIXED)
            # These two are never put in the order of the program.
            del options["ordering_token"]
            with tf.device(self._task.host):
                if self.rank == root:
                    return tf.raw_ops.CollectiveBcastSendV2(
                        input=tensor, **options
                    )
                return tf.raw_ops.CollectiveBcastRecvV2(
                    shape=tensor.shape, T=tensor.dtype, **options
                )

        return packed(
            tensors,
            lambda vectors: [
                send(vector, f"{key}.{n}") for n, vector in enumerate(vectors)
            ],
        )

    def unreachable_ranks(self) -> str:
        """Describe the ranks that do not answer; empty if all do."""
        return unreachable(self._task)

    def _announce(
        self, tensor: tf.Tensor, sent: tf.Tensor, key: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchange the shapes of the ranks' tensors, which may differ in rows.

        Args:
            sent: the elements as a vector, in the dtype that is sent.

        Returns:
            As rows, the shape of each rank's tensor and its first elements.
        """
        dimensions = tensor.shape.rank
        if not dimensions or dimensions > _MOST_DIMENSIONS:
            raise TowerError(
                f"the collective {key!r} got a tensor of shape "
                f"{tensor.shape}: the number of dimensions has to be known, "
                f"and 1 to {_MOST_DIMENSIONS}."
            )
        kind = tf.constant(
            [tensor.dtype.as_datatype_enum, dimensions], tf.int64
        )
        unused = tf.zeros([_MOST_DIMENSIONS - dimensions], tf.int64)
        shape = tf.concat([tf.shape(tensor, tf.int64), unused], 0)
        head = tf.concat([kind, shape, _first_words(sent, _HEADER_WORDS)], 0)
        heads = self._gather(head, self._keys.number(key, "head"))
        heads = tf.ensure_shape(heads, [self.size, head.shape[0]])
        kinds, shapes, words = tf.split(
            heads, [2, _MOST_DIMENSIONS, _HEADER_WORDS], axis=1
        )
        check = tf.debugging.Assert(
            tf.reduce_all(kinds == kind)
            & tf.reduce_all(shapes[:, 1:] == shapes[:1, 1:]),
            [
                f"the ranks' tensors for the collective {key!r} differ in "
                "dtype or shape, in more than the first dimension",
                heads,
            ],
        )
        with tf.control_dependencies(_control_inputs(check)):
            elements = tf.bitcast(words, sent.dtype)
            return (
                shapes[:, :dimensions],
                tf.reshape(elements, [self.size, -1]),
            )

    def _gather(
        self, vector: tf.Tensor, number: int, group: tf.Tensor | int = _FIXED
    ) -> tf.Tensor:
        """Gather vectors of N elements as a matrix with one row per rank."""
        with tf.device(self._task.host):
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
            place = self._gpu if over_nccl else self._task.host
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


def _dtype_and_shape(tensor: tf.Tensor, key: str) -> str:
    """Return a tensor's dtype and shape, which are part of its key."""
    if tensor.shape.num_elements() is None:
        raise TowerError(
            f"the collective {key!r} got a tensor of shape {tensor.shape}: "
            "every dimension has to be known when the function is traced. Give "
            "it with tf.ensure_shape or as the `shape` of a tf.TensorSpec."
        )
    return f"{tensor.dtype.name} {tensor.shape.as_list()}"


def _padded(
    tensor: tf.Tensor, needed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Pad the last axis to one of ``_PADDED_SIZES``; return its group, too."""
    rooms = tf.constant(_PADDED_SIZES, tf.int64)
    step = tf.searchsorted(rooms, needed[tf.newaxis])[0]
    padding = tf.gather(rooms, step) - tf.shape(tensor, tf.int64)[-1]
    before = [[0, 0]] * (tensor.shape.rank - 1)
    return tf.pad(tensor, [*before, [0, padding]]), _FIRST_PADDED + step


def _first_words(vector: tf.Tensor, words: int) -> tf.Tensor:
    """Return the first elements of a vector, packed into 64-bit numbers."""
    elements = words * tf.int64.size // vector.dtype.size
    first = vector[:elements]
    padded = tf.pad(first, [[0, elements - tf.size(first)]])
    if vector.dtype.size == tf.int64.size:
        return tf.bitcast(padded, tf.int64)
    return tf.bitcast(tf.reshape(padded, [words, -1]), tf.int64)


def _control_inputs(check: Any) -> list[Any]:
    # Eagerly it has been checked by now.
    return [] if check is None else [check]
