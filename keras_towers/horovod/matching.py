"""Comparing the gradients of all ranks with every reduction of them.

Horovod matches tensors by name. If ranks have gradients of different names,
each waits for what the others never send. So before they are sent, the ranks
compare a number that stands for them; that needs nothing of the step and is
done while the step computes. Numbers are compared by a maximum, in which a rank
that has joined (``hvd.join``) takes no part.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from keras_towers.meeting import check, watch

# Greater than any number that is compared; these are positive.
_BEYOND = 2**32 + 2


class Matching:
    """Compares the gradients of one reducer, and counts its reductions."""

    def __init__(self, key: str, process_set: Any):
        self._name = f"keras_towers_alike_{key}"
        self._process_set = process_set
        with tf.init_scope(), tf.device("CPU:0"):
            self._begun, self._ended = (
                tf.Variable(0, dtype=tf.int64, trainable=False)  # pyright: ignore[reportArgumentType]
                for _ in range(2)
            )
        # Counts are compared between ranks: all have to take part.
        if process_set.process_set_id == 0:
            watch.counters.append(self._count)

    def _count(self) -> tuple[int, int]:
        return int(self._begun.numpy()), int(self._ended.numpy())

    def reduce(
        self,
        described: Sequence[tuple[str, str]],
        grads: Sequence[Any],
        reduction: Callable[[], list[Any]],
    ) -> list[Any]:
        """Return ``reduction()``, or fail on all ranks if gradients differ."""
        with tf.control_dependencies([self._alike(described)]):
            reduced = reduction()
        with tf.device("CPU:0"):
            # From here on this rank only waits.
            with tf.control_dependencies(_tensors(grads)):
                begun = self._begun.assign_add(1)
            with tf.control_dependencies(_tensors(reduced)):
                self._ended.assign(begun, read_value=False)
        return reduced

    def _alike(self, described: Sequence[tuple[str, str]]) -> tf.Tensor:
        same = "\n".join(kind for kind, _ in described)
        digest = zlib.crc32(same.encode()) + 1
        with tf.device("CPU:0"):
            # In a loop no comparison begins before the last step has ended;
            # and TensorFlow's constant folding would run that of a constant.
            mine = tf.where(self._ended >= 0, tf.constant(digest, tf.int64), 0)
            highest, lowest = tf.unstack(
                hvd.allreduce(
                    tf.stack([mine, _BEYOND - mine]),
                    op=hvd.Max,
                    name=self._name,
                    process_set=self._process_set,
                    ignore_name_scope=True,
                )
            )

            def fail() -> tf.Tensor:
                text = tf.numpy_function(
                    lambda: self._difference(described), [], tf.string
                )
                failed = tf.debugging.Assert(False, [text])
                with tf.control_dependencies([failed]):
                    return tf.constant(False)

            return tf.cond(
                highest + lowest == _BEYOND, lambda: tf.constant(True), fail
            )

    def _difference(self, described: Sequence[tuple[str, str]]) -> str:
        everyone = hvd.allgather_object(
            list(described), name=self._name, process_set=self._process_set
        )
        return check.unlike_gradients(everyone)


def _tensors(values: Sequence[Any]) -> list[Any]:
    return tf.nest.flatten(list(values), expand_composites=True)
