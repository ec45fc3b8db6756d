"""BytePS as a transport: every collective is built from sums of vectors.

BytePS sums tensors on servers, which may be spare CPU machines: each worker
pushes a tensor and pulls the sum (Jiang et al., "A Unified Architecture for
Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI
2020). Gathering is the sum of vectors in which each rank has filled in its
part, broadcasting the sum of the root's vector and zeros. Their bits are added
as integers (``words_of``), so that values arrive as they were sent. Three
things that BytePS leaves to its caller are seen to here:

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
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers import compat, settings
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
from keras_towers.rendezvous.liveness import waiting
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.settings import BYTEPS_LAUNCHED, START_TIMEOUT
from keras_towers.transport import engine_transport
from keras_towers.transport.messages import MESSAGE_BYTES, packed

logger: logging.Logger = logging.getLogger("keras_towers")

# To what vectors are padded whose lengths are not known before: to more, there
# would be more branches to trace; to fewer, more zeros to send.
_LEAST_BYTES = 2**10
_GROWTH = 16
_TURNS = 2
_AGREEMENT = "kt.names"
_DIFFERENT = "the ranks do not sum the same tensors"
_SHOWN = 5
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 500_000


def load() -> ModuleType:
    """Import ``byteps.tensorflow``, or raise an error with instructions."""
    return engine_transport.load("byteps", "BytePS")


# The worker that this process is, in words; None: of no job.
_worker: str | None = None
_connected = False
# BytePS keeps declared tensors until the process ends.
_declared_names: list[str] = []
_turns: dict[str, tf.Variable] = {}


def connect(bps: ModuleType) -> None:
    """Start BytePS in this process, and wait for the others."""
    global _connected, _worker
    if _connected:
        return
    _worker = dmlc.worker()
    member = launchers.detect()
    if _worker is None and member and not member.alone:
        raise TowerError(
            f"this process is {member}, but nothing has started BytePS's "
            "scheduler and servers, so that each process would train a model "
            "of its own: use `keras-towers run -np 2 --strategy byteps "
            "script.py`, or, if the script enters the strategy itself, "
            f"`keras-towers run -np 2 --servers 1`. "
            f"{launchers.HOW_TO_BE_ALONE}"
        )
    if _worker is None and member is None:
        tf_config.refuse_apart("BytePS")
    versions.compare_with_first_rank("BytePS")
    dmlc.prepare(_worker)
    with _ending_late_start(_worker), _patient_threads():
        bps.init(lazy=False)
    # Its own way to leave waits for all others, also after an error.
    atexit.unregister(bps.shutdown)
    atexit.register(_leave_job, bps)
    _connected = True


@contextmanager
def _patient_threads() -> Iterator[None]:
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
    done = threading.Event()
    limit_s = seconds(START_TIMEOUT, settings.START_TIMEOUT_S)

    def text(waited_s: float) -> str:
        return (
            f"{worker} has waited {waited_s:.0f} s for the scheduler and all "
            "servers and workers. Do they run, reach that address, and have "
            f"the same {dmlc.NUM_WORKER} and {dmlc.NUM_SERVER}, and each "
            f"worker another {dmlc.WORKER_ID}?"
        )

    def end_if_late() -> None:
        for waited_s in waiting(limit_s, settings.NETWORK_POLL_S):
            if done.is_set():
                return
            if waited_s:
                logger.warning("%s", text(waited_s))
        if not done.is_set():
            message = f"{text(limit_s)} {START_TIMEOUT} sets the seconds."
            print(f"keras_towers: {message}", file=sys.stderr, flush=True)
            os._exit(1)

    if worker is not None:
        threading.Thread(target=end_if_late, daemon=True).start()
    try:
        yield
    finally:
        done.set()


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


class BytePSTransport(engine_transport.EngineTransport):
    """BytePS as a ``keras_towers.transport.Transport``."""

    name = "BytePS"
    carries: Collection[tf.DType] | None = None

    def __init__(self):
        super().__init__(load())
        connect(self.engine)
        self._library: Any = self.engine.ops.TF_LIB_CTYPES
        self._operation: Any = self.engine.ops.C_LIB.byteps_push_pull
        self._device: str = _device()
        self._flat = compat.hidden_variable("CPU:0", [-1], tf.int32)
        if self.size > 1 and not _declared_names:
            self._declare_and_check_ranks()
            watch.watch_over(self.rank, self.size)
            store.tell_connected(self.rank)

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
        return int(
            os.environ.get("HOROVOD_LOCAL_RANK") or self.engine.local_rank()
        )

    @property
    def local_size(self) -> int:
        return int(
            os.environ.get("HOROVOD_LOCAL_SIZE") or self.engine.local_size()
        )

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
        received = tf.reshape(split[:, self.rank], tf.shape(tensor))
        return tf.ensure_shape(received, tensor.shape)

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
            if _DIFFERENT not in str(error):
                raise
            # The next try, of other tensors maybe, is to be compared again.
            for form in set(self._functions) - known:
                del self._functions[form]
            # Without what TensorFlow adds to the message of an assertion.
            text = error.message[error.message.index(_DIFFERENT) :]
            text = text.split("'\n", 1)[0].split("\n\t", 1)[0]
            raise TowerError(text.rstrip("]'\n ")) from None

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
        shape = tf.shape(tensor, tf.int64)
        place = tf.one_hot(self.rank, self.size, dtype=tf.int64)
        (rows,) = self._sum_known([place * shape[0]], f"{key}.rows")
        bytes_of_row = tf.reduce_prod(shape[1:]) * tensor.dtype.size
        sizes = -(-(rows * bytes_of_row) // _WORD.size)
        before = tf.reduce_sum(sizes[: self.rank])
        after = tf.reduce_sum(sizes[self.rank + 1 :])
        mine = tf.pad(words_of(tensor), tf.stack([[before, after]]))
        everyone = self._sum_unknown(mine, f"{key}.words")
        parts = tf.split(everyone, sizes, num=self.size)
        gathered = [
            tensor_of(part, tensor.dtype, tf.concat([[count], shape[1:]], 0))
            for part, count in zip(parts, tf.unstack(rows), strict=True)
        ]
        return tf.ensure_shape(
            tf.concat(gathered, 0), [None, *tensor.shape[1:]]
        )

    def _send(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        words = [words_of(tensor) for tensor in tensors]
        vector = tf.concat(words, 0)
        if self.rank != root:
            vector = tf.zeros_like(vector)
        sizes = [tf.size(part) for part in words]
        sent = tf.split(self._sum_unknown(vector, key), sizes, num=len(words))
        return [
            tf.ensure_shape(
                tensor_of(part, tensor.dtype, tf.shape(tensor)),
                tensor.shape,
            )
            for tensor, part in zip(tensors, sent, strict=True)
        ]

    def _sum_known(
        self, vectors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum vectors whose lengths all ranks know, each when it is ready."""
        names = [
            self._name(f"{key}.{i}", v.dtype, v.shape.num_elements())
            for i, v in enumerate(vectors)
        ]
        refusal = self._declare(names)
        if refusal:
            return [_refused(vector, refusal) for vector in vectors]
        vectors = [self._hide_from_constant_folding(v) for v in vectors]

        def round_(turn: int) -> Callable[[], list[tf.Tensor]]:
            return lambda: [
                self._push_pull(vector, name, turn)
                for vector, name in zip(vectors, names, strict=True)
            ]

        rounds = [round_(turn) for turn in range(_TURNS)]
        sums = self._in_turn(
            names[0], lambda turn: tf.switch_case(turn, rounds)
        )
        return [
            tf.ensure_shape(total, vector.shape)
            for total, vector in zip(
                tf.nest.flatten(sums), vectors, strict=True
            )
        ]

    def _sum_unknown(self, vector: tf.Tensor, key: str) -> tf.Tensor:
        """Sum a vector whose length is known only at run time, maybe empty."""
        dtype = vector.dtype
        most = MESSAGE_BYTES // dtype.size
        lengths = [_LEAST_BYTES // dtype.size]
        while lengths[-1] < most:
            lengths.append(_GROWTH * lengths[-1])
        names = [self._name(key, dtype, length) for length in lengths]
        refusal = self._declare(names)
        if refusal:
            return _refused(vector, refusal)
        vector = self._hide_from_constant_folding(vector)

        def padded(part: tf.Tensor, length: int, name: str, turn: int):
            def round_() -> tf.Tensor:
                missing = length - tf.size(part)
                whole = tf.ensure_shape(tf.pad(part, [[0, missing]]), [length])
                return self._push_pull(whole, name, turn)

            return round_

        def chunk(number: tf.Tensor, sums: tf.TensorArray):
            part = vector[number * most : (number + 1) * most]
            rounds = [
                padded(part, length, name, turn)
                for length, name in zip(lengths, names, strict=True)
                for turn in range(_TURNS)
            ]
            shorter = tf.cast(tf.size(part) > lengths[:-1], tf.int32)
            which = _TURNS * tf.reduce_sum(shorter)
            total = self._in_turn(
                names[0], lambda turn: tf.switch_case(which + turn, rounds)
            )
            return number + 1, sums.write(number, total[: tf.size(part)])

        chunks = -(-tf.size(vector) // most)
        sums = tf.TensorArray(
            dtype, chunks, infer_shape=False, element_shape=[None]
        )
        _, sums = tf.while_loop(
            lambda number, _: number < chunks,
            chunk,
            (tf.constant(0), sums),
            parallel_iterations=1,
        )
        return sums.concat()

    def _push_pull(self, vector: tf.Tensor, name: str, turn: int) -> tf.Tensor:
        with tf.device(self._device):
            return self._operation(vector, input_name=_with_turn(name, turn))

    def _in_turn(self, name: str, push: Callable[[tf.Tensor], Any]) -> Any:
        """Push in one of two turns, which rounds of this name alternate in."""
        if name not in _turns:
            _turns[name] = compat.hidden_variable("CPU:0", 0, tf.int32)
        turn = _turns[name]
        now = turn.read_value()
        sums = push(now)
        with tf.control_dependencies(tf.nest.flatten(sums)):
            # Also in a loop the next round begins when this one has ended.
            turn.assign((now + 1) % _TURNS, read_value=False)
        return sums

    def _hide_from_constant_folding(self, vector: tf.Tensor) -> tf.Tensor:
        """Return a vector that TensorFlow does not know to be constant.

        Its constant folding would run the operation, which has no side effects
        as far as TensorFlow knows, once for all steps, and only on a rank that
        happens to trace.
        """
        flat = tf.reshape(vector, self._flat.read_value())
        return tf.ensure_shape(flat, vector.shape)

    def _name(self, key: str, dtype: tf.DType, length: int | None) -> str:
        return f"{key}/{dtype.name}/{length}"

    def _declare(self, names: Sequence[str]) -> str | None:
        """Declare the new names among these, alike on all ranks."""
        new = [name for name in names if name not in _declared_names]
        if not new:
            return None
        if _declared_names:
            with tf.init_scope():
                differing = self._differing(new)
            if differing:
                return differing
        self._add(new)
        return None

    def _add(self, names: Sequence[str]) -> None:
        declare = self._library.byteps_tensorflow_declare_tensor
        for name in names:
            _declared_names.append(name)
            for turn in range(_TURNS):
                declare(_with_turn(name, turn).encode())

    def _differing(self, new: Sequence[str]) -> str | None:
        """The error message if ranks are about to declare different names."""
        known = "\n".join([str(len(_declared_names)), *new])
        digest = hashlib.sha256(known.encode()).digest()[:8]
        own_digest = np.frombuffer(digest, np.int32)
        place = tf.one_hot(self.rank, self.size, dtype=tf.int32)
        vector = tf.reshape(place[:, tf.newaxis] * own_digest, [-1])
        (digests,) = self._sum_known([vector], _AGREEMENT)
        if (digests.numpy().reshape(-1, 2) == own_digest).all():
            return None
        lists = self.gather_objects(list(new))
        return (
            f"{_DIFFERENT}. "
            + check.describe_ranks(
                [", ".join(names[:_SHOWN]) for names in lists], "; "
            )
            + ". Every rank has to run the same model on data of the same "
            "kind, and to call the same methods in the same order."
        )

    def _declare_and_check_ranks(self) -> None:
        """Declare the tensors for agreement, and check the ranks."""
        self._add([self._name(f"{_AGREEMENT}.0", tf.int32, 2 * self.size)])
        self._add([self._name("kt.ranks.0", tf.int32, self.size)])
        place = tf.one_hot(self.rank, self.size, dtype=tf.int32)
        (times,) = self._sum_known([place], "kt.ranks")
        if (times.numpy() != 1).any():
            raise TowerError(
                "BytePS's workers have duplicate or missing ranks; ranks 0, "
                f"1, ... occur {', '.join(map(str, times.numpy()))} times: "
                f"give each worker a different {dmlc.WORKER_ID}, from 0."
            )
        self.gather_objects(None)


@functools.cache
def transport() -> BytePSTransport:
    """The connection to the other ranks, made on first use."""
    return BytePSTransport()


_WORD = tf.int32
"""The integer that every engine sums."""


def words_of(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor's bits as words [N]; the last may end with zeros."""
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    octets = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
    missing = -tf.size(octets, tf.int64) % _WORD.size
    octets = tf.pad(octets, [[0, missing]])
    return tf.bitcast(tf.reshape(octets, [-1, _WORD.size]), _WORD)


def tensor_of(words: tf.Tensor, dtype: tf.DType, shape: Any) -> tf.Tensor:
    """Return the tensor of ``shape`` whose bits ``words_of`` has returned."""
    shape = tf.cast(shape, tf.int64)
    octets = tf.reshape(tf.bitcast(words, tf.uint8), [-1])
    octets = octets[: tf.reduce_prod(shape) * dtype.size]
    if dtype == tf.bool:
        return tf.reshape(tf.cast(octets, dtype), shape)
    if dtype.size > 1:
        octets = tf.reshape(octets, [-1, dtype.size])
    return tf.reshape(tf.bitcast(octets, dtype), shape)


def _refused(vector: tf.Tensor, why: str) -> tf.Tensor:
    """A vector that raises an error when it is evaluated.

    Not earlier: a step that compares the gradients of the ranks does not ask
    for it, and knows better what differs.
    """
    with tf.control_dependencies([tf.debugging.Assert(False, [why])]):
        return tf.identity(vector)


def _with_turn(name: str, turn: int) -> str:
    return f"{name}/{turn}"


def _device() -> str:
    """The device of BytePS's tensors: a build with CUDA takes a GPU's."""
    return "/device:GPU:0" if byteps_recipe.has_cuda() else "/device:CPU:0"
