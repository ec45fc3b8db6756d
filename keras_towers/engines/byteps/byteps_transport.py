"""BytePS as a transport: every collective is built from sums of vectors.

BytePS sums tensors on servers, which may be spare CPU machines: each worker
pushes a tensor and pulls the sum (Jiang et al., "A Unified Architecture for
Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI
2020). Gathering is the sum of vectors in which each rank has filled in its
part, broadcasting the sum of the root's vector and zeros. Their bits are added
as integers, so that values arrive as they were sent. Three things that BytePS
leaves to its caller are seen to here:

- A server overwrites a tensor's sum with the first push of the next round, even
  if a slower worker has not pulled it yet. Rounds therefore alternate between
  two names: before a worker pushes to one again it has pulled the other, for
  which every worker had to push, each after it had pulled the first.
- Tensors are known by the order in which their names are declared. Ranks that
  declare new names compare them first.
- What is pushed under one name has one length. Names contain it, and a vector
  whose length differs from round to round is padded to one of a few.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import tensorflow as tf

from keras_towers import compat, settings
from keras_towers.engines import BYTEPS
from keras_towers.engines.byteps import byteps_recipe, dmlc
from keras_towers.errors import TowerError
from keras_towers.rendezvous import (
    check,
    launchers,
    store,
    tf_config,
    versions,
    watch,
)
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.settings import BYTEPS_LAUNCHED, START_TIMEOUT
from keras_towers.transport.engine_transport import EngineTransport
from keras_towers.transport.messages import (
    MESSAGE_BYTES,
    from_words,
    number_of_words,
    packed,
    words_of,
)

# To what vectors are padded whose lengths are not known before: to more, there
# would be more branches to trace; to fewer, more zeros to send.
_LEAST_BYTES = 2**10
_GROWTH = 16
_SHOWN = 5
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 500_000


# The worker that this process is, in words; None: of no job.
_worker: str | None = None
_connected = False
# Which of its two names the next round of a vector has. BytePS keeps declared
# names until the process ends.
_turns: dict[str, tf.Variable] = {}


def connect(bps: ModuleType) -> None:
    """Start BytePS in this process, and wait for the others."""
    global _connected, _worker
    if _connected:
        return
    _worker = dmlc.worker()
    member = launchers.detect()
    if _worker is None and member and not member.is_single_process:
        raise TowerError(
            f"this process is {member}, but nothing has started BytePS's "
            "scheduler and servers, so that each process would train a model "
            "of its own: use `keras-towers run -np 2 --strategy byteps "
            "script.py`, or, if the script enters the strategy itself, "
            f"`keras-towers run -np 2 --servers 1`. "
            f"{launchers.HOW_TO_TRAIN_ALONE}"
        )
    if _worker is None and member is None:
        tf_config.refuse_unread("BytePS")
    versions.compare_with_first_rank("BytePS")
    dmlc.prepare(_worker)
    with _ending_late_start(_worker), _coarse_timers():
        bps.init(lazy=False)
    # Its own way to leave waits for all others, also after an error.
    atexit.unregister(bps.shutdown)
    atexit.register(_leave_job, bps)
    _connected = True


@contextmanager
def _coarse_timers() -> Iterator[None]:
    """Give threads started inside the block a coarser timer.

    Each thread of BytePS looks for work every microsecond, which leaves little
    for the model on a machine with few cores. A thread inherits the slack of
    its timers from the one that starts it.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), 0, 0, 0)


@contextmanager
def _ending_late_start(worker: str | None) -> Iterator[None]:
    """End the process if others do not arrive: no exception reaches C++."""
    limit_s = seconds(START_TIMEOUT, settings.START_TIMEOUT_S)
    text = (
        f"{worker} has waited {limit_s:.0f} s for the scheduler and all "
        "servers and workers. Do they run, reach that address, and have the "
        f"same {dmlc.NUM_WORKER} and {dmlc.NUM_SERVER}, and each worker "
        f"another {dmlc.WORKER_ID}? {START_TIMEOUT} sets the seconds."
    )
    late = threading.Timer(limit_s, watch.end_process, [text])
    late.daemon = True
    if worker is not None:
        late.start()
    try:
        yield
    finally:
        late.cancel()


def _leave_job(bps: ModuleType) -> None:
    """Leave the job at the end of Python.

    BytePS's ``shutdown`` ends the servers too, once all workers have called it.
    Where the launcher ends them there is nothing to wait for, and after an
    error in this process there would be no end to it.
    """
    failed = getattr(sys, "last_value", None) is not None
    if _worker is not None and (BYTEPS_LAUNCHED in os.environ or failed):
        # Destructors of BytePS would find its threads running. This is called
        # after Python's end, with the exit code.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        return
    bps.shutdown()


class BytePSTransport(EngineTransport):
    """BytePS as a ``keras_towers.transport.Transport``."""

    name = "BytePS"

    def __init__(self):
        super().__init__(BYTEPS.import_module())
        connect(self.engine)
        self._library: Any = self.engine.ops.TF_LIB_CTYPES
        self._operation: Any = self.engine.ops.C_LIB.byteps_push_pull
        # A build with CUDA takes a GPU's tensors.
        kind = "GPU" if byteps_recipe.has_cuda() else "CPU"
        self._device: str = f"/device:{kind}:0"
        self._flat = compat.hidden_variable("CPU:0", [-1], tf.int32)
        self._compares_names = False
        if self.size > 1 and not _turns:
            self._check_ranks()
            # What compares names has names of its own.
            self.gather_objects(None)
            watch.start_watch(self.rank, self.size)
            store.report_connected(self.rank)
        self._compares_names = True

    @property
    def was_launched(self) -> bool:
        """Whether the environment describes a job, even of one process."""
        return _worker is not None or launchers.detect() is not None

    @property
    def sums_float16(self) -> bool:
        # Its servers use the processor's instructions for it.
        return True

    @property
    def local_rank(self) -> int:
        # For BytePS every process without a GPU is a machine of its own.
        return int(os.environ.get("HOROVOD_LOCAL_RANK") or super().local_rank)

    @property
    def local_size(self) -> int:
        return int(os.environ.get("HOROVOD_LOCAL_SIZE") or super().local_size)

    def _check_ranks(self) -> None:
        place = tf.one_hot(self.rank, self.size, dtype=tf.int32)
        (times,) = self.all_reduce([place], "kt.ranks")
        if (times.numpy() != 1).any():
            raise TowerError(
                "BytePS's workers have duplicate or missing ranks; ranks 0, "
                f"1, ... occur {', '.join(map(str, times.numpy()))} times: "
                f"give each worker a different {dmlc.WORKER_ID}, from 0."
            )

    def _gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        shape = tf.shape(tensor, tf.int64)
        place = tf.one_hot(self.rank, self.size, dtype=tf.int64)
        (rows,) = self._sum([place * shape[0]], f"{key}.rows")
        shapes = [
            tf.concat([[count], shape[1:]], 0) for count in tf.unstack(rows)
        ]
        sizes = number_of_words(tensor.dtype, tf.stack(shapes))
        # Of unknown length: one of its own would keep memory on all servers.
        before = tf.reduce_sum(sizes[: self.rank])
        after = tf.reduce_sum(sizes[self.rank + 1 :])
        mine = tf.pad(words_of(tensor), tf.stack([[before, after]]))
        (everyone,) = self._sum([mine], f"{key}.words")
        parts = tf.split(everyone, sizes, num=self.size)
        gathered = [
            from_words(part, tensor.dtype, shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return tf.concat(gathered, 0)

    def _sum(self, tensors: Sequence[tf.Tensor], key: str) -> list[tf.Tensor]:
        return packed(tensors, lambda vectors: self._sum_each(vectors, key))

    def _sum_each(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        vectors = [tf.reshape(tensor, [-1]) for tensor in tensors]
        names = [
            {
                length: f"{key}.{number}/{vector.dtype.name}/{length}"
                for length in _lengths(vector)
            }
            for number, vector in enumerate(vectors)
        ]
        self._declare(
            [name for by_length in names for name in by_length.values()]
        )
        return [
            tf.reshape(self._sum_vector(vector, by_length), tf.shape(tensor))
            for vector, by_length, tensor in zip(
                vectors, names, tensors, strict=True
            )
        ]

    def _sum_vector(
        self, vector: tf.Tensor, names: Mapping[int, str]
    ) -> tf.Tensor:
        """Sum a vector under a name for its length.

        Args:
            names: the names by length, of which there are several if the length
                is known only at run time; it may be 0.
        """
        if len(names) == 1:
            (name,) = names.values()
            return self._push_pull(vector, name)
        *shorter, longest = names

        def padded(part: tf.Tensor, length: int) -> Callable[[], tf.Tensor]:
            def total() -> tf.Tensor:
                whole = tf.pad(part, [[0, length - tf.size(part)]])
                whole = tf.ensure_shape(whole, [length])
                return self._push_pull(whole, names[length])

            return total

        def chunk(number: tf.Tensor, sums: tf.TensorArray):
            part = vector[number * longest : (number + 1) * longest]
            step = tf.reduce_sum(tf.cast(tf.size(part) > shorter, tf.int32))
            total = tf.switch_case(
                step, [padded(part, length) for length in names]
            )
            return number + 1, sums.write(number, total[: tf.size(part)])

        chunks = -(-tf.size(vector) // longest)
        sums = tf.TensorArray(
            vector.dtype, chunks, infer_shape=False, element_shape=[None]
        )
        _, sums = tf.while_loop(
            lambda number, _: number < chunks,
            chunk,
            (tf.constant(0), sums),
            parallel_iterations=1,
        )
        return sums.concat()

    def _push_pull(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sum a vector of a known length, in turn under each of two names.

        If TensorFlow knew it to be constant, its constant folding would run the
        operation, which has no side effects as far as TensorFlow knows, once
        for all steps, and only on a rank that happens to trace.
        """
        hidden = tf.reshape(vector, self._flat.read_value())
        hidden = tf.ensure_shape(hidden, vector.shape)

        def push(turn: int) -> Callable[[], tf.Tensor]:
            def sum_of_ranks() -> tf.Tensor:
                with tf.device(self._device):
                    return self._operation(
                        hidden, input_name=_with_turn(name, turn)
                    )

            return sum_of_ranks

        turn = _turns[name]
        is_second = turn.read_value()
        total = tf.cond(is_second, push(1), push(0))
        with tf.control_dependencies([total]):
            # Also in a loop the next round begins when this one has ended.
            turn.assign(~is_second, read_value=False)
        return tf.ensure_shape(total, vector.shape)

    def _declare(self, names: Sequence[str]) -> None:
        """Declare the names that are new, if they are so on all ranks."""
        new = [name for name in names if name not in _turns]
        if not new:
            return
        if self._compares_names:
            with tf.init_scope():
                ranks = self.gather_objects(new)
            if any(other != ranks[0] for other in ranks):
                listed = [", ".join(names[:_SHOWN]) for names in ranks]
                raise tf.errors.InvalidArgumentError(
                    None,
                    None,
                    f"{check.OTHER_STEP}, and do not sum the same tensors: "
                    f"{check.describe_ranks(listed, '; ')}. Every rank has to "
                    "run the same model on data of the same kind, and to call "
                    "the same methods in the same order.",
                )
        for name in new:
            _turns[name] = compat.hidden_variable("CPU:0", False)
            for turn in range(2):
                declared = _with_turn(name, turn).encode()
                self._library.byteps_tensorflow_declare_tensor(declared)


@functools.cache
def transport() -> BytePSTransport:
    """The connection to the other ranks, made on first use."""
    return BytePSTransport()


def _with_turn(name: str, turn: int) -> str:
    return f"{name}/{turn}"


def _lengths(vector: tf.Tensor) -> list[int]:
    """The lengths under which a vector may be sent: its own, if it is known."""
    known = vector.shape.num_elements()
    if known is not None:
        return [known]
    longest = MESSAGE_BYTES // vector.dtype.size
    lengths = [_LEAST_BYTES // vector.dtype.size]
    while lengths[-1] < longest:
        lengths.append(_GROWTH * lengths[-1])
    return lengths
