"""TensorFlow's collective operations as a transport.

Between hosts they run over TensorFlow's own gRPC servers: a ring for CPUs
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009), NCCL for GPUs. One device of each rank takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.meeting import watch
from keras_towers.transport import forms, peers, plain
from keras_towers.transport.instances import InstanceKeys
from keras_towers.transport.operations import Operations
from keras_towers.transport.runtime import Task

_MOST_DIMENSIONS = 8
# What a head has room for: a tensor of less needs no message of its own.
_WORDS = 6


class CollectiveTransport:
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
        self._task = task
        self._run = Operations(task, gpu)
        watch.watch_over(self.rank, self.size)

    @property
    def rank(self) -> int:
        return self._task.cluster.rank

    @property
    def size(self) -> int:
        return self._task.cluster.size

    @property
    def local_rank(self) -> int:
        return self._task.cluster.local_rank

    @property
    def local_size(self) -> int:
        return self._task.cluster.local_size

    def mark(self, what: str) -> None:
        watch.mark(what)

    def passed(self) -> None:
        """Record that this rank waits no longer for what it marked last."""
        watch.passed()

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        def total(tensor: tf.Tensor, key: str) -> tf.Tensor:
            form = forms.known(tensor, key)
            return self._run.reduce(tensor, self._keys.number(key, "sum", form))

        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        totals = forms.packed([forms.summable(t) for t in tensors], total, key)
        return [
            forms.summed(value, tensor.dtype)
            for value, tensor in zip(totals, tensors, strict=True)
        ]

    def all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        sent = forms.carried(tf.reshape(tensor, [-1]))
        shapes, heads = self._announce(tensor, sent, key)
        counts = tf.reduce_prod(shapes, axis=1)
        widest = tf.reduce_max(counts)

        def everything() -> tf.Tensor:
            padded, group = forms.with_room(sent, widest)
            number = self._keys.number(key, "all", sent.dtype.name)
            return self._run.gather(padded, number, group)

        room = _WORDS * tf.int64.size // sent.dtype.size
        rows = tf.cond(widest <= room, lambda: heads, everything)
        whole = tf.concat([rows[r, : counts[r]] for r in range(self.size)], 0)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], shapes[0, 1:]], 0)
        gathered = tf.reshape(forms.received(whole, tensor.dtype), shape)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        sent = forms.carried(tf.reshape(tensor, [-1]))
        shapes, _ = self._announce(tensor, sent, key)
        alike = tf.debugging.Assert(
            tf.reduce_all(shapes == shapes[:1]),
            ["the ranks' tensors differ in shape", shapes],
        )
        with tf.control_dependencies(_in_a_graph(alike)):
            each = tf.reduce_prod(shapes[0]) // self.size
        padded, group = forms.with_room(tf.reshape(sent, [self.size, -1]), each)
        number = self._keys.number(key, "swap", sent.dtype.name)
        swapped = self._run.swap(padded, number, group)[:, :each]
        parts = forms.received(tf.reshape(swapped, [-1]), tensor.dtype)
        return tf.reshape(parts, tf.shape(tensor))

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        def send(tensor: tf.Tensor, key: str) -> tf.Tensor:
            form = forms.known(tensor, key)
            number = self._keys.number(key, "from", root, form)
            return self._run.broadcast(tensor, number, root)

        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        values = forms.packed([forms.carried(t) for t in tensors], send, key)
        return [
            forms.received(value, tensor.dtype)
            for value, tensor in zip(values, tensors, strict=True)
        ]

    def gather_objects(self, value: Any) -> list[Any]:
        return plain.gather(self.all_gather, value)

    def lost(self) -> str:
        """The ranks that do not answer, in words; empty if all do."""
        return peers.lost(self._task)

    def _announce(
        self, tensor: tf.Tensor, sent: tf.Tensor, key: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Tell the ranks of one another's tensors, which may differ in rows.

        Args:
            sent: its elements as a vector, in the dtype that is sent.

        Returns:
            The shape of each rank's tensor and its first elements, as rows.
        """
        dimensions = tensor.shape.rank
        if not dimensions or dimensions > _MOST_DIMENSIONS:
            raise TowerError(
                f"the collective {key!r} got a tensor of shape "
                f"{tensor.shape}: it takes 1 to {_MOST_DIMENSIONS} dimensions, "
                "a known number of them."
            )
        kind = tf.constant(
            [tensor.dtype.as_datatype_enum, dimensions], tf.int64
        )
        unused = tf.zeros([_MOST_DIMENSIONS - dimensions], tf.int64)
        shape = tf.concat([tf.shape(tensor, tf.int64), unused], 0)
        head = tf.concat([kind, shape, forms.as_words(sent, _WORDS)], 0)
        heads = self._run.gather(head, self._keys.number(key, "head"))
        heads = tf.ensure_shape(heads, [self.size, head.shape[0]])
        kinds, shapes, words = tf.split(
            heads, [2, _MOST_DIMENSIONS, _WORDS], axis=1
        )
        alike = tf.debugging.Assert(
            tf.reduce_all(kinds == kind)
            & tf.reduce_all(shapes[:, 1:] == shapes[:1, 1:]),
            [
                f"the ranks' tensors for the collective {key!r} differ in "
                "dtype or shape, in more than the first dimension",
                heads,
            ],
        )
        with tf.control_dependencies(_in_a_graph(alike)):
            elements = tf.bitcast(words, sent.dtype)
            return (
                shapes[:, :dimensions],
                tf.reshape(elements, [self.size, -1]),
            )


def _in_a_graph(check: Any) -> list[Any]:
    # Eagerly it has been checked by now.
    return [] if check is None else [check]
