"""TensorFlow's collective operations, as ranks call them here."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.transport.instances import FIXED, OVER_NCCL
from keras_towers.transport.runtime import Task

# The token of all that NCCL does.
_ONE_ORDER = -1


class Operations:
    """The operations, each of one device of every rank.

    The number of a collective is its instance, as in ``InstanceKeys``.

    Args:
        gpu: the device that sums over NCCL; None: everything is sent from the
            host.
    """

    def __init__(self, task: Task, gpu: str | None = None):
        self._task = task
        self._gpu = gpu
        self._tokens: dict[int, tf.Tensor] = {}

    def reduce(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        """Sum a tensor of one shape over the ranks."""
        floats = tensor.dtype in (tf.float16, tf.float32, tf.float64)
        over_nccl = self._gpu is not None and floats
        with tf.device(self._gpu if over_nccl else self._task.host):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                **self._options(number, FIXED, over_nccl),
                merge_op="Add",
                final_op="Id",
            )

    def gather(
        self, tensor: tf.Tensor, number: int, group: tf.Tensor | int = FIXED
    ) -> tf.Tensor:
        """Gather vectors of N elements as a matrix, a row for each rank."""
        with tf.device(self._task.host):
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=tensor, **self._options(number, group)
            )
        return tf.reshape(gathered, [self._task.cluster.size, -1])

    def swap(
        self, tensor: tf.Tensor, number: int, group: tf.Tensor | int
    ) -> tf.Tensor:
        """Send row r of a matrix to rank r, and get one of each rank."""
        with tf.device(self._task.host):
            return tf.raw_ops.CollectiveAllToAllV2(
                input=tensor, **self._options(number, group)
            )

    def broadcast(self, tensor: tf.Tensor, number: int, root: int) -> tf.Tensor:
        """Give all ranks the tensor of rank ``root``, of one shape."""
        options = self._options(number, FIXED)
        # These two are never put in the order of the program.
        del options["ordering_token"]
        with tf.device(self._task.host):
            if self._task.cluster.rank == root:
                return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **options)
            return tf.raw_ops.CollectiveBcastRecvV2(
                shape=tensor.shape, T=tensor.dtype, **options
            )

    def _options(
        self, number: int, group: tf.Tensor | int, over_nccl: bool = False
    ) -> dict[str, Any]:
        """The arguments of all operations."""
        # TensorFlow would run them one by one, in the order of the program, and
        # wait forever where that differs between ranks. With tokens it keeps
        # those in order that have the same, which NCCL needs.
        token = _ONE_ORDER if over_nccl else number
        if token not in self._tokens:
            place = self._gpu if over_nccl else self._task.host
            with tf.init_scope(), tf.device(place):
                self._tokens[token] = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32, shape=[], shared_name=f"kt.token.{token}"
                )
        return {
            "group_size": self._task.cluster.size,
            "group_key": OVER_NCCL if over_nccl else group,
            "instance_key": number,
            "ordering_token": [self._tokens[token]],
            "communication_hint": "nccl" if over_nccl else "ring",
        }
