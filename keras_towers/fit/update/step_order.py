"""Ordering of steps, and of their collectives, over all ranks."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import error_notes
from keras_towers.fit.data.batches import (
    TowerBatch,
    identity_of,
    tensors_in,
)
from keras_towers.fit.data.same_data import different_data
from keras_towers.reduction import sum_over_ranks
from keras_towers.rendezvous import rank_checks
from keras_towers.transport import Transport, next_key

if TYPE_CHECKING:
    from keras_towers.fit.step.constants import Constants

_HOST = "CPU:0"
_BATCH = "they have different examples in a batch after the first one"


class StepOrder:
    """Orders the steps of a rank, and checks that the ranks' steps match.

    TensorFlow may overlap steps that share no variable; two collectives would
    then be in flight with the same key. And if the steps of two ranks had
    different collectives, the ranks would wait for each other.

    Attributes:
        gate: the tensors for which a step waits before it begins.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._turn = compat.hidden_variable(_HOST, 0, tf.int64)
        # What steps exchange, and their constants.
        self._traced: dict[int, list[str]] = {}
        self._constants: dict[tuple[str, int], None] = {}
        self._begun = 0
        self.gate: list[Any] = []
        self._batch: list[Any] = []
        # The assertions that this step matches the steps of the other ranks.
        self._agreement: list[Any] | None = None
        self._exchanged: list[Any] = []

    def begin_step(self, batch: TowerBatch) -> TowerBatch:
        """Return the batch of a step once the previous step has ended."""
        # Steps of a single process may overlap.
        self.gate = []
        if self._transport.size == 1:
            return batch
        self._begun = len(compat.get_default_graph().get_operations())
        self.gate = [self._turn.read_value()]
        return self._gate_batch(batch)

    def _gate_batch(self, batch: Any) -> Any:
        with tf.control_dependencies(self.gate):
            batch = identity_of(batch)
        self._batch = tensors_in(batch)
        return batch

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Order all operations of a step, even operations without a batch."""
        self._agreement, self._exchanged = None, []
        try:
            with tf.control_dependencies(self.gate):
                yield
        finally:
            self._agreement, self._batch = None, []

    def begin_after(self, before: Callable[[], tf.Tensor], batch: Any) -> Any:
        """Return the batch of a step that begins when a tensor is ready."""
        # Once inlined, functions that get this batch wait only for the batch.
        with tf.control_dependencies(self.gate):
            self.gate = [before()]
        return self._gate_batch(batch)

    def compare(
        self,
        described: Sequence[str],
        constants: Constants,
        batch: Any,
        data: tf.Tensor | None = None,
    ) -> None:
        """Make exchanges wait for a check that all ranks make the same ones.

        Args:
            described: what the ranks exchange, in its order.
            constants: the constants of the step, which must be the same, too,
                on ranks that have traced it for the same specs.
            batch: the specs of the batch for which the step was traced.
            data: integers of the global batch, which differ by at most one
                between ranks with the same batch; None: each has its own.
        """
        self._constants.update(dict.fromkeys(_numbered(constants.shown)))
        leaves = tf.nest.flatten(batch)
        sizes = [str(getattr(leaf, "shape", None)) for leaf in leaves]
        self._agreement = self._assert_same_step(
            described,
            [constants.digest, zlib.crc32(" ".join(sizes).encode())],
            constants.approximate,
            data,
        )

    def once_compared(self, act: Callable[[], None]) -> None:
        """Do something after the check that all ranks do the same."""
        with tf.control_dependencies(self._agreement):
            act()

    def exchange(
        self,
        tensors: Sequence[Sequence[Any]],
        exchange: Callable[[Sequence[Sequence[Any]]], list[Any]],
    ) -> list[Any]:
        """Exchange tensors, after a check that all ranks do the same."""
        # In a step that involves no other rank, all exchanges are local.
        if not self._agreement:
            return exchange(tensors)
        with tf.control_dependencies(self._agreement):
            results = exchange(identity_of(tensors))
        # Every rank takes part, even if it does not use the results.
        self._exchanged += tensors_in(results)
        return results

    def end_step(self, result: Any) -> Any:
        """Allow the next step to begin, and return the result of this step."""
        if self._transport.size == 1:
            return result
        operations = compat.get_default_graph().get_operations()[self._begun :]
        effects = [op for op in operations if op.op_def.is_stateful]
        last = [*tensors_in(result), *effects, *done_by_all(self._exchanged)]
        with tf.control_dependencies(last):
            done = self._turn.assign_add(1, read_value=False)
        with tf.control_dependencies([done]):
            return identity_of(result)

    def count(self, batch: TowerBatch, here: Any) -> Any:
        """Count a step's examples on all ranks; stop when there are none.

        A rank whose data has ended takes part without examples until the data
        of all ranks has ended: ``tf.errors.OutOfRangeError`` then ends the
        epoch on all ranks.
        """
        row = row_of_rank(tf.cast(here, tf.int64), self._transport)
        (counts,) = sum_over_ranks(self._transport, [row])
        total = tf.reduce_sum(counts)
        self.gate = [_end_of_data_if(total <= 0)]
        start = tf.reduce_sum(counts[: self._transport.rank])
        return self._gate_batch(batch._replace(total=total, start=start))

    def reduce(
        self,
        described: Sequence[str],
        tower_grads: Sequence[Sequence[Any]],
        reduction: Callable[[Sequence[Sequence[Any]]], list[list[Any]]],
    ) -> list[list[Any]]:
        """Reduce K lists of N gradients, if all ranks have the same ones."""
        if not tower_grads[0]:
            return [list(grads) for grads in tower_grads]
        if self._transport.size == 1:
            return reduction(tower_grads)
        agreement = self._agreement
        if agreement is None:
            agreement = self._assert_same_step(described)
        with tf.control_dependencies(agreement):
            return reduction(identity_of(tower_grads))

    def _assert_same_step(
        self,
        described: Sequence[str],
        constants: Sequence[int] = (0, 0),
        approximate: Sequence[int] = (0, 0, 0),
        data: tf.Tensor | None = None,
    ) -> list[Any]:
        """Compare the ranks' steps; return assertions that fail if they differ.

        Ranks trace at different times, so a mismatch is found at run time. The
        step then fails before any other collective has begun.
        """
        if self._transport.size == 1:
            return []
        kinds = map(rank_checks.without_numbers, described)
        digest = zlib.crc32("\n".join(kinds).encode())
        self._traced[digest] = list(described)
        if tf.executing_eagerly():
            where = "compares the steps"
            if len(set(rank_checks.gather(self._transport, digest, where))) > 1:
                raise self.mismatch_error()
            return []
        # At the end of the data there is no batch, and the step is cancelled.
        # TensorFlow's collectives hang if they are cancelled while they run.
        with tf.control_dependencies(self._batch):
            # TensorFlow's constant folding would run an exchange of constants.
            exact = tf.constant([digest, *constants], tf.int64)
            exact = tf.where(self._turn >= 0, exact, 0)
            nearly = tf.constant(approximate, tf.int64)
            if data is not None:
                nearly = tf.concat([nearly, data], 0)
        equal = self.are_equal(exact, nearly)
        same_exchanges, same_integers, same_sizes = tf.unstack(equal[:3])
        same_reals = tf.reduce_all(equal[3 : 3 + len(approximate)])
        same_data = equal[3 + len(approximate) :]
        # Ranks with data of their own may know other sizes of a batch, on which
        # constants depend.
        same_constants = (same_integers & same_reals) | ~same_sizes
        same_step = same_exchanges & same_constants
        agreement = [tf.debugging.Assert(same_step, [rank_checks.OTHER_STEP])]
        if data is None:
            return agreement
        # Other steps may have other data: say that the steps differ.
        with tf.control_dependencies(agreement):
            return agreement + error_notes.assert_for_user(
                tf.reduce_all(same_data), str(different_data(_BATCH)), []
            )

    def are_equal(self, exact: tf.Tensor, approximate: Any = ()) -> tf.Tensor:
        """Whether all ranks have the same numbers, for each of them.

        Args:
            exact: 32-bit numbers.
            approximate: more numbers, which may differ by one.
        """
        # One sum is faster than a gather, which exchanges sizes first.
        size = self._transport.size
        half = tf.constant(2**16, tf.int64)
        exact = tf.reshape(exact, [-1])
        halves = tf.concat([exact // half, tf.math.floormod(exact, half)], 0)
        nearly = tf.cast(approximate, tf.int64)
        numbers = tf.concat([halves, nearly], 0)
        both = tf.concat([numbers, numbers**2], 0)
        (sums,) = self._transport.all_reduce([both], next_key("gradients"))
        # The mean of the squares equals the square of the mean only if all
        # numbers are equal. Of large numbers, both are modulo 2**64.
        total, squares = tf.split(sums, 2)
        slack = tf.ones_like(nearly) * size**2
        allowed = tf.concat([tf.zeros_like(halves), slack], 0)
        equal = abs(squares * size - total**2) <= allowed
        high, low, others = tf.split(
            equal, [tf.size(exact), tf.size(exact), tf.size(nearly)]
        )
        return tf.concat([high & low, others], 0)

    def is_mismatch(self, error: Exception) -> bool:
        """Whether an error says that the steps of ranks differ."""
        return rank_checks.OTHER_STEP in str(error)

    def mismatch_error(self) -> TowerError:
        """Return an error that names the differences. Collective."""
        lists, constants = zip(
            *rank_checks.gather(
                self._transport,
                (list(self._traced.values()), list(self._constants)),
                "compares the steps",
            ),
            strict=True,
        )
        of_ranks = [
            {tuple(map(rank_checks.without_numbers, of)): of for of in own}
            for own in lists
        ]
        common = set.intersection(*map(set, of_ranks))
        odd = [
            [
                pair
                for kinds, described in own.items()
                if kinds not in common
                for pair in zip(_numbered(kinds), described, strict=True)
            ]
            for own in of_ranks
        ]
        numbered = [list(map(tuple, own)) for own in constants]
        return TowerError(rank_checks.describe_steps(odd, numbered))


def _numbered(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return texts with the number of equal ones before each."""
    seen: Counter[str] = Counter()
    numbered = []
    for text in texts:
        numbered.append((text, seen[text]))
        seen[text] += 1
    return numbered


def row_of_rank(value: Any, transport: Transport) -> tf.Tensor:
    """Return a row per rank: the value for this rank, 0 for other ranks."""
    zeros = tf.zeros_like(value)
    return tf.stack(
        [value if r == transport.rank else zeros for r in range(transport.size)]
    )


def done_by_all(tensors: Sequence[Any]) -> list[Any]:
    """Return a tensor that depends on all exchanges of a rank.

    The rank may not use their results, and TensorFlow would prune exchanges
    that have no side effects and feed only a control dependency.
    """
    if not tensors:
        return []
    first = [tf.reshape(tensor, [-1])[:1] for tensor in tensors]
    return [tf.raw_ops.Assert(condition=_true().read_value(), data=first)]


@functools.cache
def _true() -> tf.Variable:
    return compat.hidden_variable(_HOST, True)


def _end_of_data_if(condition: tf.Tensor) -> tf.Tensor:
    def end():
        return next(iter(tf.data.Dataset.from_tensors(0).take(0)))

    return tf.cond(condition, end, lambda: 0)
