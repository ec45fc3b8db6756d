"""The transport of TensorFlow's collectives, between tasks of ``TF_CONFIG``.

Between hosts these run over TensorFlow's own gRPC servers: a ring for CPUs
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009), NCCL for GPUs. One device of each rank takes part.

TensorFlow matches the collectives of ranks by two numbers: the key of a group
of devices, and the key of an instance in it. The shape and dtype of an instance
are fixed when it first runs; another shape under the same keys aborts all
collectives of the process.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import tensorflow as tf

from keras_towers.engines.runtime import tensorflow_task
from keras_towers.engines.runtime.tensorflow_task import Task
from keras_towers.foundation.errors import EXCHANGE_WITH, FAILED_ON, TowerError
from keras_towers.jobs.rendezvous import failed_calls, watch
from keras_towers.transport import messages
from keras_towers.transport.engine_transport import EngineTransport
from keras_towers.transport.memory_turns import Turns

_P = ParamSpec("_P")

# Keys of groups: for collectives whose instance key contains their size; for
# the same over NCCL, since all devices of a group are of one kind; and for
# collectives padded to the first of _PADDED_SIZES. Later sizes have the keys
# that follow.
_FIXED, _OVER_NCCL, _FIRST_PADDED = 1, 2, 3

# Numbers of words to which vectors of unknown size are padded. Such collectives
# have one instance key for all sizes, but a group for each. More sizes would
# mean more groups, fewer would mean more padding. No size is 0: TensorFlow
# aborts the process if it gathers nothing.
_PADDED_SIZES: tuple[int, ...] = tuple(
    (4 + quarter) * 2**octave for octave in range(2, 38) for quarter in range(4)
)

# Tensors of up to this size are gathered and then summed: a ring gather takes
# half as many consecutive messages as a ring all-reduce.
_SMALL_BYTES = 2**15
# The bytes that ranks send at a time of a tensor that they add up.
_PIECE_BYTES = 2**22
# The dtypes that the operations send from the host.
_SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
# The number of words of a tensor that its header holds. Tensors that fit need
# no further message.
_HEADER_WORDS = 12


# In the error of a collective, before the one that it ends with; and the rank
# that sent that one, or whose connection broke.
_ABORTED = "Collective ops is aborted by: "
_OTHER_TASK = re.compile(r"from remote target (/job:\w+/replica:0/task:\d+)")

# The name of each key. TensorFlow's keys are shared by all strategies of the
# process.
_names: dict[int, str] = {}


def instance_key(*parts: object) -> int:
    """Return the key of a collective, 0 to 2**31 - 1, equal on all ranks."""
    name = " ".join(map(str, parts))
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    key = int.from_bytes(digest) >> 1
    other = _names.setdefault(key, name)
    if other != name:
        raise TowerError(
            f"the collectives {other!r} and {name!r} have the same number, "
            f"{key}, by chance. Change the name or the shape of either."
        )
    return key


def message_bytes(kind: str, sizes: Sequence[int], ranks: int) -> int:
    """Return the memory of exchanges from the host, as ``Transport`` does.

    Args:
        kind: the kind of the exchanges.
        sizes: as for ``Transport.message_bytes``.
        ranks: the number of ranks.
    """
    size = sum(sizes)
    # At a time it sends one part and receives another, in a ring, or all of
    # them. Each is in two buffers, of the message and of gRPC.
    part = size // ranks
    if kind == "scatter":
        # Of two tensors the sums, and of two pieces what is sent and received.
        sums = sum(sorted(sizes)[-2:]) // ranks
        pieces = min(size, 2 * _PIECE_BYTES)
        return sums + 2 * pieces + 4 * (pieces - pieces // ranks)
    # A sum receives what it then adds up.
    return 4 * part + (size if kind == "sum" else 0)


def _on_host(
    method: Callable[Concatenate[CollectiveTransport, _P], tf.Tensor],
) -> Callable[Concatenate[CollectiveTransport, _P], tf.Tensor]:
    """Make a method compute on the host what it sends from there.

    TensorFlow rewrites operations that it has placed on a GPU to others, which
    a GPU may not have.
    """

    @functools.wraps(method)
    def placed(
        self: CollectiveTransport, *args: _P.args, **kwargs: _P.kwargs
    ) -> tf.Tensor:
        with tf.device(self.task.host):
            return method(self, *args, **kwargs)

    return placed


class CollectiveTransport(EngineTransport):
    """TensorFlow's collectives as a ``keras_towers.transport.Transport``."""

    name = "TensorFlow"

    def __init__(self, task: Task):
        super().__init__(task.cluster)
        self.task: Task = task
        self._gpu: str | None = None
        self._tokens: dict[str, tf.Tensor] = {}
        # While one piece is added up, the next one is sent.
        self._turns = Turns(2)
        self._has_left, self._is_renewed = False, True
        watch.start_watch(self.rank, self.size)

    def sum_on(self, gpu: str | None) -> None:
        self._gpu = gpu

    @property
    def sums_float16(self) -> bool:
        return self._gpu is not None

    def message_bytes(self, kind: str, sizes: Sequence[int]) -> int:
        if self._gpu is not None:
            return super().message_bytes(kind, sizes)
        return message_bytes(kind, sizes, self.size)

    def abort(self) -> None:
        tensorflow_task.abort_call(failed_calls.calls.why)

    def leave(self) -> None:
        # Not again once this rank, or another one, may have renewed them.
        if not self._has_left:
            tensorflow_task.abort_call(failed_calls.calls.why)
            self._has_left, self._is_renewed = True, False

    def renew(self) -> None:
        if not self._is_renewed:
            watch.join_wait()
            tensorflow_task.renew_collectives(self.task)
            self._is_renewed = True

    def reconnect(self) -> None:
        self._has_left = False

    def ended_ranks(self) -> str:
        return super().ended_ranks() or tensorflow_task.unreachable(self.task)

    def cause_of(self, error: Any) -> Exception:
        # All collectives of a process end with the first one that fails, there
        # or on a rank whose data they wait for.
        _, *causes = str(error.message).split(_ABORTED)
        line = next((c.splitlines()[0] for c in causes if c.strip()), "")
        if FAILED_ON in line:
            return TowerError(line)
        of_tasks = {self.task.name_of(rank): rank for rank in range(self.size)}
        for name in _OTHER_TASK.findall(str(error.message))[:1]:
            rank = of_tasks[name]
            address = self.task.cluster.workers[rank]
            line = f"{EXCHANGE_WITH} {rank} ({address}) failed: {line}"
        return type(error)(None, None, line) if line else error

    def engine_sum(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        # Packed, because each collective takes at least one small message.
        return messages.send_packed(
            tensors,
            lambda vectors: [
                self._sum_one(vector, f"{key}.{n}")
                for n, vector in enumerate(vectors)
            ],
        )

    def _goes_over_nccl(self, tensor: tf.Tensor | tf.TensorSpec) -> bool:
        """Whether a tensor goes over NCCL, which sends no empty ones."""
        floats = tensor.dtype in (tf.float16, tf.float32, tf.float64)
        shape = tensor.shape
        known = shape.is_fully_defined() and shape.num_elements() > 0
        return self._gpu is not None and floats and known

    def _sum_one(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        if not self._goes_over_nccl(tensor):
            return self._sum_on_host(tensor, key)
        with tf.device(self._gpu):
            return self._reduce(tensor, key, over_nccl=True)

    @_on_host
    def _sum_on_host(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        if not tensor.shape.is_fully_defined():
            # A gather exchanges the sizes first.
            gathered = self.engine_gather(tensor[tf.newaxis], f"{key}.any")
            return tf.reduce_sum(gathered, 0)
        if tensor.shape.num_elements() * tensor.dtype.size > _SMALL_BYTES:
            return self._reduce(tensor, key)
        instance = instance_key(key, "each", _signature(tensor))
        gathered = self._gather_rows(tf.reshape(tensor, [-1]), instance)
        return tf.reshape(tf.reduce_sum(gathered, 0), tensor.shape)

    def _reduce(
        self, tensor: tf.Tensor, key: str, over_nccl: bool = False
    ) -> tf.Tensor:
        instance = instance_key(key, "sum", _signature(tensor))
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            **self._arguments(instance, _FIXED, over_nccl),
            merge_op="Add",
            final_op="Id",
        )

    @_on_host
    def engine_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        words = messages.words_of(tensor)
        first = words[:_HEADER_WORDS]
        first = tf.pad(first, [[0, _HEADER_WORDS - tf.size(first)]])
        mine = tf.concat([messages.header(tensor, key), first], 0)
        headers, first_words = tf.split(
            self._gather_rows(mine, instance_key(key, "head")),
            [messages.HEADER, _HEADER_WORDS],
            axis=1,
        )
        shapes = messages.shapes_of_ranks(headers, tensor, key)
        longest = tf.reduce_max(messages.number_of_words(tensor.dtype, shapes))

        def gather_padded() -> tf.Tensor:
            sizes = tf.constant(_PADDED_SIZES, tf.int64)
            index = tf.searchsorted(sizes, longest[tf.newaxis])[0]
            size = tf.gather(sizes, index)
            padded = tf.pad(words, [[0, size - tf.size(words, tf.int64)]])
            instance = instance_key(key, "all")
            return self._gather_rows(padded, instance, _FIRST_PADDED + index)

        rows = tf.cond(
            longest <= _HEADER_WORDS, lambda: first_words, gather_padded
        )
        gathered = [
            messages.from_words(rows[rank], tensor.dtype, shapes[rank])
            for rank in range(self.size)
        ]
        return tf.concat(gathered, 0)

    def engine_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        sent = messages.summable(tensor)
        # Only GPUs have the operation.
        on_gpu = self._gpu is not None and "GPU" in self._gpu
        if not on_gpu or not self._goes_over_nccl(sent):
            return self._scatter_on_host(tensor, counts, key)
        with tf.device(self._gpu):
            padded = messages.with_rows_each(sent, counts)
            instance = instance_key(key, "part", _signature(padded))
            part = tf.raw_ops.CollectiveReduceScatterV2(
                input=padded,
                **self._arguments(instance, _FIXED, over_nccl=True),
                merge_op="Add",
                final_op="Id",
            )
            return messages.summed(part[: counts[self.rank]], tensor.dtype)

    @_on_host
    def _scatter_on_host(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        """Sum over the ranks in pieces, of which two are sent at a time."""
        scatter, inner = super().engine_scatter, tensor.shape[1:]
        if not inner.is_fully_defined():
            return scatter(tensor, counts, key)
        rows = max(counts)
        padded = messages.with_rows_each(tensor, counts)
        of_ranks = tf.reshape(padded, [self.size, rows, *inner])
        row_bytes = self.size * inner.num_elements() * tensor.dtype.size
        length = max(1, _PIECE_BYTES // max(1, row_bytes))

        def add_up(first: int, turn: str) -> list[tf.Tensor]:
            piece = of_ranks[:, first : first + length]
            each = [min(length, rows - first)] * self.size
            together = tf.reshape(piece, [sum(each), *inner])
            return [scatter(together, each, f"{key}.{first}")]

        sums = [
            self._turns.take(functools.partial(add_up, first))[0]
            for first in range(0, rows, length)
        ]
        return tf.concat(sums, 0)[: counts[self.rank]]

    def engine_gather_known(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        # Its bits travel as those of another one.
        is_bfloat16 = tensor.dtype == tf.bfloat16
        dtype = tf.float16 if is_bfloat16 else tensor.dtype
        if not self._goes_over_nccl(
            tf.TensorSpec([max(counts), *tensor.shape[1:]], dtype)
        ):
            return self._gather_on_host(tensor, counts, key)
        with tf.device(self._gpu):
            sent = tf.bitcast(tensor, dtype) if is_bfloat16 else tensor
            padded = messages.with_rows(sent, max(counts))
            instance = instance_key(key, "rows", _signature(padded))
            rows = tf.raw_ops.CollectiveGatherV2(
                input=padded,
                **self._arguments(instance, _FIXED, over_nccl=True),
            )
            parts = zip(tf.split(rows, self.size), counts, strict=True)
            whole = tf.concat([part[:count] for part, count in parts], 0)
            return tf.bitcast(whole, tensor.dtype) if is_bfloat16 else whole

    @_on_host
    def _gather_on_host(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        inner = tensor.shape[1:]
        if not inner.is_fully_defined():
            return self.engine_gather(tensor, key)
        padded = messages.with_rows(tensor, max(counts))
        instance = instance_key(key, "rows", _signature(padded))
        sent = tf.reshape(_sent_parts(padded, 1), [-1])
        rows = self._gather_rows(sent, instance)
        shape = tf.TensorShape([self.size]).concatenate(padded.shape)
        parts = _received(rows, tensor.dtype, shape)
        if min(counts) == max(counts):
            return tf.reshape(parts, [sum(counts), *inner])
        gathered = [parts[rank, :count] for rank, count in enumerate(counts)]
        return tf.concat(gathered, 0)

    @_on_host
    def engine_exchange(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        if not tensor.shape.is_fully_defined():
            return super().engine_exchange(tensor, key)
        instance = instance_key(key, "swap", _signature(tensor))
        swapped = tf.raw_ops.CollectiveAllToAllV2(
            input=_sent_parts(tensor, self.size),
            **self._arguments(instance, _FIXED),
        )
        return _received(swapped, tensor.dtype, tensor.shape)

    def engine_broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        # A sum with zeros, because a gather would send every rank's tensors.
        words = [messages.words_of(tensor) for tensor in tensors]
        if self.rank != root:
            words = [tf.zeros_like(vector) for vector in words]
        return [
            messages.from_words(vector, tensor.dtype, tf.shape(tensor))
            for vector, tensor in zip(
                self.engine_sum(words, key), tensors, strict=True
            )
        ]

    def _gather_rows(
        self, vector: tf.Tensor, instance: int, group: tf.Tensor | int = _FIXED
    ) -> tf.Tensor:
        """Gather vectors of N elements as a matrix with one row per rank."""
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=vector, **self._arguments(instance, group)
        )
        return tf.reshape(gathered, [self.size, -1])

    def _arguments(
        self, instance: int, group: tf.Tensor | int, over_nccl: bool = False
    ) -> dict[str, object]:
        """The arguments that all operations have.

        Without tokens, TensorFlow would run the operations in the order of the
        program, and wait forever if that differs between ranks. With tokens it
        orders only operations with the same token, which NCCL needs.
        """
        token = "nccl" if over_nccl else str(instance)
        if token not in self._tokens:
            device = self._gpu if over_nccl else self.task.host
            with tf.init_scope(), tf.device(device):
                self._tokens[token] = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32, shape=[], shared_name=f"kt.token.{token}"
                )
        return {
            "group_size": self.size,
            "group_key": _OVER_NCCL if over_nccl else group,
            "instance_key": instance,
            "ordering_token": [self._tokens[token]],
            "communication_hint": "nccl" if over_nccl else "ring",
        }


def _sent_parts(tensor: tf.Tensor, number: int) -> tf.Tensor:
    """Return equal parts of the rows as [number, N], of a dtype that is sent.

    Without a copy, if that is the tensor's own.
    """
    if tensor.dtype in _SENT:
        return tf.reshape(tensor, [number, -1])
    return tf.stack(list(map(messages.words_of, tf.split(tensor, number))))


def _received(
    sent: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape
) -> tf.Tensor:
    """Undo ``_sent_parts``: return all parts as a tensor of a shape."""
    if sent.dtype == dtype:
        return tf.reshape(sent, shape)
    rows = tf.unstack(sent)
    size = shape.num_elements() // len(rows)
    parts = [messages.from_words(row, dtype, [size]) for row in rows]
    return tf.reshape(tf.concat(parts, 0), shape)


def _signature(tensor: tf.Tensor) -> str:
    """Return a tensor's dtype and shape, which are part of its key."""
    return f"{tensor.dtype.name} {tensor.shape.as_list()}"
