"""Ordering of steps, and of their collectives, over all ranks."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.data import batches as data_lib
from keras_towers.meeting import check as check_lib
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport, next_key

_HOST = "CPU:0"
_UNLIKE = "the ranks have mismatched gradients"


class StepOrder:
    """Order and agreement of the ranks' steps."""

    # TensorFlow may overlap steps of one function that no variable orders; two
    # collectives would then be in flight with the same key. And if ranks had
    # gradients for different variables, an all-reduce would hang.

    def __init__(self, transport: Transport):
        self._transport = transport
        self._turn = compat.hidden_variable(_HOST, 0, tf.int64)
        self._alike = compat.hidden_variable(_HOST, True)
        self._traced: dict[int, list[str]] = {}
        self._inside = False
        self._begun = 0
        self._ordered = False
        self._gate: list[Any] = []
        self._batch: list[Any] = []
        self._first: int | None = None

    def begin_call(self, resets: bool) -> None:
        """Note that steps of a method follow, which may reset metrics."""
        ordered = resets and self._transport.size > 1
        self._first = int(self._turn) if ordered else None

    def begins_a_call(self) -> bool:
        """Whether all ranks have metrics in the state of their beginning."""
        # A single process always knows their state.
        if self._transport.size == 1:
            return True
        with tf.init_scope():
            return self._first == int(self._turn)

    def begin(
        self, batch: data_lib.TowerBatch, alone: bool = False
    ) -> data_lib.TowerBatch:
        """Return the batch of a step once the previous step has ended."""
        # Steps of a single process may overlap unless they are ``alone``.
        self._gate = []
        self._ordered = self._transport.size > 1 or alone
        if not self._ordered or tf.executing_eagerly():
            return batch
        self._begun = len(compat.get_default_graph().get_operations())
        self._gate = [self._turn.read_value()]
        with tf.control_dependencies(self._gate):
            batch = _identity(batch)
        self._batch = _tensors(batch)
        return batch

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Order all operations of a step, even those without a batch."""
        before, self._inside = self._inside, True
        try:
            with self.gated():
                yield
        finally:
            self._inside = before

    def gated(self) -> Any:
        """Return a block whose operations wait for the step to begin."""
        gate = [] if tf.executing_eagerly() else self._gate
        return tf.control_dependencies(gate)

    def first(self, before: Callable[[], tf.Tensor]) -> None:
        """Let a step begin once the tensor that a function returns is ready."""
        with self.gated():
            self._gate = [before()]

    def behind(self, before: Callable[[], tf.Tensor], batch: Any) -> Any:
        """Return the batch of a step that begins as with ``first``."""
        # What is called with it waits only for its arguments, once inlined.
        self.first(before)
        with self.gated():
            return _identity(batch)

    def end(self, result: Any, last: Callable[[], None] | None = None) -> Any:
        """Let the next step begin, and return the result of this one."""
        # A step with mismatched gradients fails here, once all of its
        # operations have ended, as ``last`` is called.
        if not self._ordered or tf.executing_eagerly():
            if last is not None:
                last()
            return result
        operations = compat.get_default_graph().get_operations()[self._begun :]
        effects = [op for op in operations if op.op_def.is_stateful]
        with tf.control_dependencies(_tensors(result) + effects):
            if last is not None:
                last()
            done = self._turn.assign_add(1, read_value=False)
            check = _assert_alike(self._alike.read_value())
        with tf.control_dependencies([done, check]):
            return _identity(result)

    def count(self, batch: data_lib.TowerBatch, here: Any) -> Any:
        """Count a step's examples on all ranks; stop when there are none."""
        # A rank whose data has ended takes part without examples until then: at
        # run time ``tf.errors.OutOfRangeError`` ends the data of all.
        ranks = self._transport.size
        mine = tf.one_hot(self._transport.rank, ranks, dtype=tf.int64)
        (counts,) = sum_over_ranks(
            self._transport, [mine * tf.cast(here, tf.int64)]
        )
        total = tf.reduce_sum(counts)
        self._gate = [_end_of_data_if(total <= 0)]
        with tf.control_dependencies(self._gate):
            return _identity(batch)._replace(
                total=tf.identity(total),
                start=tf.reduce_sum(counts[: self._transport.rank]),
            )

    def gather(self, outputs: Any) -> Any:
        """Concatenate outputs of shape [examples, ...] of all ranks."""
        if self._transport.size == 1:
            return outputs

        def one(tensor):
            if not isinstance(tensor, tf.Tensor):
                raise TowerError(
                    f"an output of the model is a {type(tensor).__name__}, "
                    "which cannot be gathered over processes: make it dense, "
                    "or predict in one process."
                )
            return self._transport.all_gather(tensor, next_key("outputs"))

        return tf.nest.map_structure(one, outputs)

    def reduce(
        self,
        described: Sequence[str],
        rows: Sequence[Sequence[Any]],
        reduction: Callable[[Sequence[Sequence[Any]]], list[list[Any]]],
    ) -> list[list[Any]]:
        """Reduce K lists of N gradients, if those of all ranks are alike."""
        # Ranks trace at different times, so a mismatch is found at run time.
        # The step then skips the all-reduce and fails at its end on every rank,
        # so that no other collective is left hanging.
        if self._transport.size == 1:
            return reduction(rows) if rows[0] else [list(row) for row in rows]
        kinds = map(check_lib.unnumbered, described)
        digest = zlib.crc32("\n".join(kinds).encode())
        self._traced[digest] = list(described)
        if tf.executing_eagerly():
            where = "reduces gradients"
            if len(set(check_lib.gather(self._transport, digest, where))) > 1:
                raise self.difference()
            return reduction(rows)
        # At the end of data there is no batch, and an exchange that has begun
        # is cancelled: TensorFlow's collectives then hang.
        with tf.control_dependencies(self._batch if self._inside else []):
            # TensorFlow's constant folding would run the gather of a constant.
            mine = tf.where(self._turn >= 0, tf.constant(digest, tf.int64), 0)
        alike = self._are_alike(mine)
        if self._inside:
            self._alike.assign(self._alike & alike)
        else:
            with tf.control_dependencies([_assert_alike(alike)]):
                alike = tf.identity(alike)
        sums = tf.cond(alike, lambda: reduction(rows)[0], lambda: rows[0])
        return [sums for _ in rows]

    def _are_alike(self, number: tf.Tensor) -> tf.Tensor:
        """Whether the ranks have the same number, of 32 bits."""
        # By one sum: a gather has to find out the sizes first.
        half = tf.constant(2**16, tf.int64)
        halves = tf.stack([number // half, tf.math.floormod(number, half)])
        both = tf.concat([halves, halves**2], 0)
        (sums,) = self._transport.all_reduce([both], next_key("gradients"))
        # Only of equal numbers is the mean of the squares that of them squared.
        return tf.reduce_all(sums[2:] * self._transport.size == sums[:2] ** 2)

    def failed(self, error: Exception) -> bool:
        """Whether a step failed because of mismatched gradients."""
        return _UNLIKE in str(error)

    def difference(self) -> TowerError:
        """Return the error that names the mismatched gradients. Collective."""
        self._alike.assign(True)
        lists = check_lib.gather(
            self._transport, dict(self._traced), "compares the gradients"
        )
        known = set.intersection(*(set(traced) for traced in lists))
        odd = [
            [
                (check_lib.unnumbered(name), name)
                for digest in traced.keys() - known
                for name in traced[digest]
            ]
            for traced in lists
        ]
        return TowerError(check_lib.unlike_gradients(odd))


def _tensors(structure: Any) -> list[tf.Tensor]:
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]


def _identity(structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf,
        structure,
        expand_composites=True,
    )


def _assert_alike(alike: Any) -> tf.Operation:
    return tf.debugging.Assert(alike, [_UNLIKE])


def _end_of_data_if(condition: tf.Tensor) -> tf.Tensor:
    def end():
        return next(iter(tf.data.Dataset.from_tensors(0).take(0)))

    return tf.cond(condition, end, lambda: 0)
