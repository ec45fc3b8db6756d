"""One process per device, connected by BytePS, which only sums vectors.

BytePS sums tensors on servers, which may be spare CPU machines: each worker
pushes a tensor and pulls the sum (Jiang et al., "A Unified Architecture for
Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI
2020). A gather is the sum of vectors in which each rank has filled in its
share, a broadcast is the sum of the root's vector and zeros. Their bits are
added as integers, so that values arrive exactly as they were sent. BytePS
leaves three tasks to its caller:

- A server overwrites a tensor's sum with the first push of the next round, even
  if a slower worker has not pulled it yet. So rounds alternate between two
  names. Before a worker pushes to a name again, it has pulled the sum of the
  other name, to which every worker has pushed after pulling the first sum.
- Tensors are identified by the order in which their names are declared. So
  ranks compare new names before they declare them.
- All tensors pushed under one name must have the same length. So names contain
  the length, and vectors whose length may change are padded to one of a few.
- Every worker and a server have a buffer for each name until they end. So large
  vectors of one length take turns with two pairs of names.

Nothing interrupts BytePS, either. If a rank leaves a call in which others wait
for its push, it pushes zeros instead. Each vector ends in a one, so that a sum
tells how many ranks have pushed theirs. It may push zeros where it has pushed
before: so other names are used from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from keras_towers.engines.byteps import byteps_process, byteps_recipe, dmlc
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.known_engines import BYTEPS
from keras_towers.jobs.rendezvous import (
    failed_calls,
    launchers,
    rank_checks,
    separate_training,
    store,
    watch,
)
from keras_towers.transport import messages, plain_values
from keras_towers.transport.engine_transport import EngineTransport
from keras_towers.transport.memory_turns import Turns

# Vectors of unknown length are padded to sizes from _MIN_BYTES on, each _GROWTH
# times the one before. More sizes mean more branches to trace, fewer mean more
# zeros to send.
_MIN_BYTES = 2**10
_GROWTH = 16
_LARGE_BYTES = 2**18
# Names that an error lists for each rank, at most.
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The rounds in which ranks push to a name.

    Attributes:
        length: of the vector that is pushed.
        dtype: of that vector.
        begun: a variable: how many rounds this rank has begun.
        ended: a variable: how many have ended. The next one uses the first of
            the two names if that is even.
    """

    length: int
    dtype: tf.DType
    begun: tf.Variable
    ended: tf.Variable


# BytePS keeps declared names until the process ends.
_rounds: dict[str, _Rounds] = {}
# Followed by the number of failed calls, the key of the store with the rounds
# in which ranks wait: a name, and how many of its rounds have ended.
_WAITING = "byteps-waiting-"


class BytePSTransport(EngineTransport):
    """BytePS as a ``keras_towers.transport.Transport``."""

    name = "BytePS"

    def __init__(self):
        super().__init__()
        self.engine = BYTEPS.import_module()
        byteps_process.connect(self.engine)
        self._library: ctypes.CDLL = self.engine.ops.TF_LIB_CTYPES
        self._operation: Callable[..., tf.Tensor] = (
            self.engine.ops.C_LIB.byteps_push_pull
        )
        # A build with CUDA takes tensors of a GPU.
        kind = "GPU" if byteps_recipe.has_cuda() else "CPU"
        self._device: str = f"/device:{kind}:0"
        self._compares_names = False
        # While one is pulled, the next one is pushed.
        self._turns = Turns(2)
        # The rounds in which this rank waits, as others know; and those in
        # which it has pushed zeros.
        self._waiting: set[str] = set()
        self._left: set[str] = set()
        if self.size > 1 and not _rounds:
            mine = tf.one_hot(self.rank, self.size, dtype=tf.int32)
            (counts,) = self.all_reduce([mine], "kt.ranks")
            if (counts.numpy() != 1).any():
                raise TowerError(
                    "BytePS's workers have duplicate or missing ranks; ranks "
                    f"0, 1, ... occur {', '.join(map(str, counts.numpy()))} "
                    f"times: give each worker a different {dmlc.WORKER_ID}, "
                    "from 0."
                )
            self._meet()
            separate_training.take_place(self)
            watch.start_watch(self.rank, self.size)
            store.report_connected(self.rank)
        self._compares_names = True

    @property
    def sums_float16(self) -> bool:
        # The servers use the processor's float16 instructions.
        return True

    @property
    def kept_bytes(self) -> int:
        # A buffer for each of the two names, from the first push on. A vector
        # of unknown length has names that it may never need.
        return sum(
            min(2, int(rounds.begun.numpy()))
            * rounds.length
            * rounds.dtype.size
            for rounds in _rounds.values()
        )

    def message_bytes(self, kind: str, size: int) -> int:
        # What it pushes and, unless that is the result, what it pulls.
        return size if kind == "sum" else 2 * size

    @property
    def is_launched(self) -> bool:
        """Whether something has started this process as a worker."""
        is_worker = byteps_process.worker is not None
        return is_worker or launchers.detect() is not None

    @property
    def rank(self) -> int:
        return int(self.engine.rank())

    @property
    def size(self) -> int:
        return int(self.engine.size())

    # Without GPUs, BytePS counts each process as a machine with one local rank.
    # The launcher sets Horovod's variables for all engines.
    @property
    def local_rank(self) -> int:
        return int(
            os.environ.get("HOROVOD_LOCAL_RANK") or self.engine.local_rank()
        )

    @property
    def local_size(self) -> int:
        return int(
            os.environ.get("HOROVOD_LOCAL_SIZE") or self.engine.local_size()
        )

    def engine_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        mine = tf.one_hot(self.rank, self.size, dtype=tf.int32)
        mine = mine[:, tf.newaxis] * messages.header(tensor, key)
        (headers,) = self.engine_sum([mine], f"{key}.headers")
        shapes = messages.shapes_of_ranks(headers, tensor, key)
        sizes = messages.number_of_words(tensor.dtype, shapes)
        return self._gather(
            tensor,
            tf.unstack(shapes, self.size),
            tf.unstack(sizes, self.size),
            f"{key}.words",
        )

    def engine_gather_known(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        inner = tensor.shape[1:]
        if not inner.is_fully_defined():
            return self.engine_gather(tensor, key)
        shapes = [[count, *inner] for count in counts]
        sizes = [
            -(-math.prod(shape) * tensor.dtype.size // messages.WORD.size)
            for shape in shapes
        ]
        return self._gather(tensor, shapes, sizes, f"{key}.words")

    def _gather(
        self,
        tensor: tf.Tensor,
        shapes: Sequence[tf.Tensor | list[int]],
        sizes: Sequence[tf.Tensor | int],
        key: str,
    ) -> tf.Tensor:
        """Concatenate the rows of all ranks.

        Args:
            tensor: this rank's rows.
            shapes: the shapes of those of all ranks.
            sizes: how many words they are. If these are tensors, TensorFlow
                does not know the length of what is summed: a name for each
                length would take memory on all servers.
            key: as for ``engine_sum``.
        """
        before, after = sum(sizes[: self.rank]), sum(sizes[self.rank + 1 :])
        words = tf.pad(messages.words_of(tensor), tf.stack([[before, after]]))
        if all(isinstance(size, int) for size in sizes):
            words = tf.ensure_shape(words, [sum(sizes)])
        (words,) = self.engine_sum([words], key)
        gathered = [
            messages.from_words(of_rank, tensor.dtype, shape)
            for of_rank, shape in zip(
                tf.split(words, sizes, num=self.size), shapes, strict=True
            )
        ]
        return tf.concat(gathered, 0)

    def engine_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        # Servers send every worker the whole sum; a gather would send more.
        (total,) = self.engine_sum([messages.summable(tensor)], key)
        rows = tf.split(total, counts)[self.rank]
        return messages.summed(rows, tensor.dtype)

    def engine_sum(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        return messages.send_packed(
            tensors, lambda vectors: self._sum_each(vectors, key)
        )

    def _sum_each(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        vectors = [tf.reshape(tensor, [-1]) for tensor in tensors]
        failed = failed_calls.calls.round
        names = [
            {}
            if _is_large(vector)
            else {
                length: f"{failed}.{key}.{number}/{vector.dtype.name}/{length}"
                for length in _lengths(vector)
            }
            for number, vector in enumerate(vectors)
        ]
        self._declare(
            {
                name: (length + 1, vector.dtype)
                for vector, by_length in zip(vectors, names, strict=True)
                for length, name in by_length.items()
            }
        )
        sums = [
            self._sum_vector(vector, by_length)
            if by_length
            else self._sum_in_turn(vector, key)
            for vector, by_length in zip(vectors, names, strict=True)
        ]
        return [
            tf.reshape(total, tf.shape(tensor))
            for total, tensor in zip(sums, tensors, strict=True)
        ]

    def _sum_in_turn(self, vector: tf.Tensor, key: str) -> tf.Tensor:
        """Sum a vector under a name that others of its kind use, too."""
        (length,) = _lengths(vector)
        # Exchanges for other purposes are never taken for one another.
        purpose = re.sub(r"\d+", "", key)

        def exchange(turn: str) -> list[tf.Tensor]:
            name = f"{failed_calls.calls.round}.{turn}"
            self._declare({name: (length + 1, vector.dtype)})
            return [self._push_pull(vector, name)]

        kind = f"{purpose}/{vector.dtype.name}/{length}"
        return self._turns.take(exchange, kind)[0]

    def _sum_vector(
        self, vector: tf.Tensor, names: Mapping[int, str]
    ) -> tf.Tensor:
        """Sum a vector under a name for its length.

        Args:
            vector: the vector, possibly empty.
            names: the names by length. If there are several, the length is
                known only at run time, and the vector is padded; one that is
                longer than all of them is sent in chunks.
        """
        if len(names) == 1:
            (name,) = names.values()
            return self._push_pull(vector, name)
        *shorter, longest = names

        def sum_padded(part: tf.Tensor, length: int) -> tf.Tensor:
            padded = tf.pad(part, [[0, length - tf.size(part)]])
            padded = tf.ensure_shape(padded, [length])
            return self._push_pull(padded, names[length])

        def sum_chunk(number: tf.Tensor, sums: tf.TensorArray):
            part = vector[number * longest : (number + 1) * longest]
            index = tf.reduce_sum(tf.cast(tf.size(part) > shorter, tf.int32))
            total = tf.switch_case(
                index, [functools.partial(sum_padded, part, n) for n in names]
            )
            return number + 1, sums.write(number, total[: tf.size(part)])

        chunks = -(-tf.size(vector) // longest)
        sums = tf.TensorArray(
            vector.dtype, chunks, infer_shape=False, element_shape=[None]
        )
        _, sums = tf.while_loop(
            lambda number, _: number < chunks,
            sum_chunk,
            (tf.constant(0), sums),
            parallel_iterations=1,
        )
        return sums.concat()

    def _push_pull(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sum a vector of a known length, alternating between two names."""
        rounds = _rounds[name]
        number = rounds.ended.read_value()
        with tf.control_dependencies(
            [rounds.begun.assign(number + 1, read_value=False)]
        ):
            one = tf.ones([1], vector.dtype)
            # TensorFlow does not know that the operation has effects.
            sent = compat.unknown(tf.concat([vector, one], 0))
        sent = tf.ensure_shape(sent, [rounds.length])
        total = tf.cond(
            number % 2 == 1,
            lambda: self._push(sent, f"{name}/1"),
            lambda: self._push(sent, f"{name}/0"),
        )
        with tf.control_dependencies([total]):
            # Even in a loop, the next round begins after this one.
            ended = rounds.ended.assign(number + 1, read_value=False)
        total = tf.ensure_shape(total, [rounds.length])
        complete = total[-1] == tf.cast(self.size, total.dtype)
        text = "a rank has left the call for which this one waits"
        check = tf.debugging.Assert(complete, [text])
        with tf.control_dependencies([check, ended]):
            return tf.identity(total[:-1])

    def _push(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Push a vector, and pull the sum."""
        with tf.device(self._device):
            return self._operation(vector, input_name=name)

    def abort(self) -> None:
        server, new = store.store_of_job(), _begun_rounds() - self._waiting
        if server is None or not new:
            return
        with contextlib.suppress(OSError):
            server.add(self._key, self.rank, sorted(new))
            self._waiting |= new

    def leave(self) -> None:
        server = store.store_of_job()
        if server is None:
            return
        for waiting, ranks in (server.get(self._key) or {}).items():
            name, _, ended = waiting.rpartition(" ")
            is_mine = ranks == [self.rank]
            if not is_mine and waiting not in self._left and name in _rounds:
                self._left.add(waiting)
                # It waits for ranks that may push in another order.
                threading.Thread(
                    target=self._push_zeros,
                    args=(_rounds[name], f"{name}/{int(ended) % 2}"),
                    daemon=True,
                ).start()

    @property
    def _key(self) -> str:
        return f"{_WAITING}{failed_calls.calls.round}"

    def _push_zeros(self, rounds: _Rounds, name: str) -> None:
        with compat.outside(compat.HOST):
            self._push(tf.zeros([rounds.length], rounds.dtype), name)

    def reconnect(self) -> None:
        self._waiting.clear()
        self._left.clear()
        self._meet()

    def _meet(self) -> None:
        """Declare the names that later comparisons of names use."""
        self._compares_names = False
        # Not a short one, whose names are only some.
        self.gather_objects(" " * 4 * plain_values.FIRST_WORDS)
        self._compares_names = True

    def _declare(self, specs: Mapping[str, tuple[int, tf.DType]]) -> None:
        """Declare the names that are new, if they are new on all ranks.

        Args:
            specs: for each name the length and dtype of what is pushed.
        """
        new = [name for name in specs if name not in _rounds]
        if not new:
            return
        if self._compares_names:
            where = "prepares another step, or is about to sum other tensors"
            with tf.init_scope():
                ranks = rank_checks.gather(self, new, where)
            if any(other != ranks[0] for other in ranks):
                listed = [", ".join(names[:_NAMED]) for names in ranks]
                raise tf.errors.InvalidArgumentError(
                    None,
                    None,
                    f"{rank_checks.OTHER_STEP}, and do not sum the same "
                    f"tensors: {rank_checks.describe_ranks(listed, '; ')}. "
                    "Every rank must run the same model on data of the same "
                    "kind, and call the same methods in the same order.",
                )
        for name in new:
            begun, ended = (compat.hidden_variable(0) for _ in range(2))
            _rounds[name] = _Rounds(*specs[name], begun, ended)
            for number in range(2):
                declared = f"{name}/{number}".encode()
                self._library.byteps_tensorflow_declare_tensor(declared)


def _begun_rounds() -> set[str]:
    """The rounds that have begun and not ended."""
    begun = set()
    for name, rounds in [*_rounds.items()]:
        ended = int(rounds.ended.numpy())
        if int(rounds.begun.numpy()) > ended:
            begun.add(f"{name} {ended}")
    return begun


@functools.cache
def transport() -> BytePSTransport:
    """The connection to the other ranks, made on first use."""
    return BytePSTransport()


def _is_large(vector: tf.Tensor) -> bool:
    """Whether a vector takes turns with others of its length, if it is known.

    Small ones do not wait for one another.
    """
    known = vector.shape.num_elements() or 0
    return known * vector.dtype.size >= _LARGE_BYTES


def _lengths(vector: tf.Tensor) -> list[int]:
    """The lengths with which a vector may be sent: its own, if it is known."""
    known = vector.shape.num_elements()
    if known is not None:
        return [known]
    longest = messages.MESSAGE_BYTES // vector.dtype.size
    lengths = [_MIN_BYTES // vector.dtype.size]
    while lengths[-1] < longest:
        lengths.append(_GROWTH * lengths[-1])
    return lengths
