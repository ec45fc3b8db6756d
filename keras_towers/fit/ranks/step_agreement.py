"""Agreement of ranks on the step that they take, and on its data.

``compared_step.py`` has what ranks compare; ``step_order.py`` runs the
comparison before the first exchange.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.data.same_data import (
    SIZE,
    different_numbers,
    refuse_other_batch,
)
from keras_towers.fit.ranks.compared_step import (
    ComparedStep,
    Constants,
    ConstantText,
)
from keras_towers.fit.weights.copies import copy_first, read_handle
from keras_towers.rendezvous import rank_checks
from keras_towers.transport import Transport, next_key

_Result = TypeVar("_Result")

# The steps of a rank run one after another, and each compares itself once. So
# ranks that trace other steps, or have no further batch, meet under one key.
STEP_KEY = "kt.step"
# The key of updates that are compared alone, as at the end of a round.
UPDATE_KEY = "gradients"
# The words for ranks that compare steps.
_COMPARES = "compares the steps"
# In place of the digest of a step: the data has ended.
_END = -1


class StepAgreement:
    """Checks that the ranks' steps match.

    If the steps of two ranks had different collectives, the ranks would wait
    for each other.

    Args:
        transport: connects the ranks.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        # The steps of this rank, by what others compare of them.
        self._traced: dict[tuple[int, ...], ComparedStep] = {}

    def assert_same(
        self, step: ComparedStep, after: Sequence[object], key: str
    ) -> list[tf.Operation]:
        """Compare the ranks' steps; return assertions that fail if they differ.

        Ranks trace at different times, so a mismatch is found at run time. The
        step then fails before any other collective has begun.

        Args:
            step: what to compare.
            after: tensors for which the comparison waits.
            key: the key of the collective.
        """
        (exact, approximate), data = step.numbers, step.fingerprint
        name = (*exact, *approximate)
        # The last one is the one that was traced last.
        self._traced.pop(name, None)
        # Not the fingerprint, a tensor of a graph that may be freed.
        self._traced[name] = dataclasses.replace(step, fingerprint=None)
        # At the end of the data there is no batch, and the step is cancelled.
        # TensorFlow's collectives hang if they are cancelled while they run.
        with tf.control_dependencies(after):
            equal = self._compare(exact, approximate, data, key)
        number = len(approximate)
        exchanges, operations, integers, sizes = tf.unstack(equal.exact)
        reals = tf.reduce_all(equal.approximate[:number])
        # Ranks with data of their own may know other sizes of a batch, on which
        # operations and constants depend.
        same_step = exchanges & ((operations & integers & reals) | ~sizes)
        assertions: list[tf.Operation] = []
        if not tf.executing_eagerly():
            text = [rank_checks.OTHER_STEP]
            assertions.append(tf.debugging.Assert(same_step, text))
        elif not same_step:
            raise self.mismatch_error()
        if data is None:
            return assertions
        same_data = tf.reduce_all(equal.approximate[number:])
        # Other steps may have other data: say that the steps differ.
        with tf.control_dependencies(assertions):
            return assertions + refuse_other_batch(
                self._transport, same_data, data
            )

    def all_end(self, batches: Any, in_rounds: bool = False) -> tf.Tensor:
        """Whether the data of all ranks ends after so many batches.

        A rank whose data goes on compares its next step instead; in rounds of
        local SGD, the update that ends its round.
        """
        key = next_key(UPDATE_KEY) if in_rounds else STEP_KEY
        ended = [_END, batches, 0, 0]
        equal = self._compare(ended, Constants().approximate, key=key)
        return tf.reduce_all(equal.exact)

    def take_over(
        self, variables: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
    ) -> tf.Tensor:
        """Assign rank 0's values to variables, unless all are the same.

        Args:
            variables: of each variable, the handles of its copies on K towers,
                or its only handle.
            devices: the K towers' devices.
        """
        values = [read_handle(handles[0]) for handles in variables]
        rows = [tf.fingerprint(tf.reshape(value, [1, -1])) for value in values]
        digest = tf.reshape(tf.fingerprint(tf.concat(rows, 1)), [2, 4])
        digest = tf.cast(tf.bitcast(digest, tf.uint32), tf.int64)
        key = next_key(UPDATE_KEY)
        equal = are_equal(self._transport, digest, [], key)

        def send() -> tf.Tensor:
            key = next_key("broadcast")
            received = self._transport.broadcast(values, key)
            for handles, value in zip(variables, received, strict=True):
                tf.raw_ops.AssignVariableOp(resource=handles[0], value=value)
                copy_first(handles, devices[: len(handles)])
            return tf.ones((), tf.int64)

        same = tf.reduce_all(equal.exact)
        return tf.cond(same, lambda: tf.zeros((), tf.int64), send)

    def _compare(
        self,
        exact: Sequence[int | tf.Tensor],
        constants: Sequence[int],
        data: tf.Tensor | None = None,
        key: str = STEP_KEY,
    ) -> Equal:
        if data is None:
            data = tf.zeros(SIZE, tf.int64)
        mine = tf.convert_to_tensor(exact, tf.int64)
        nearly = tf.concat([tf.constant(constants, tf.int64), data], 0)
        if tf.executing_eagerly():
            numbers = mine.numpy(), nearly.numpy()
            ranks = rank_checks.gather(self._transport, numbers, _COMPARES)
            exacts, others = map(np.array, zip(*ranks, strict=True))
            spread = np.ptp(others, 0)
            return Equal(
                *map(tf.constant, (np.ptp(exacts, 0) == 0, spread <= 1))
            )
        return outside_of_loops(
            lambda: are_equal(self._transport, mine, nearly, key)
        )()

    def mismatch_error(self, batches: str | None = None) -> TowerError:
        """Return an error that names the differences. Collective.

        Args:
            batches: after how many batches this rank's data has ended; None: it
                is in a step.
        """
        where, traced = _COMPARES, self._traced
        ranks = rank_checks.gather(self._transport, ([*traced], batches), where)
        ends = [of_rank for _, of_rank in ranks]
        if set(ends) != {None}:
            return different_numbers(["more" if n is None else n for n in ends])
        common = set.intersection(*({*map(tuple, own)} for own, _ in ranks))
        # A rank whose steps others have had, too, is in one of these.
        odd = [step for name, step in traced.items() if name not in common]
        odd = odd or [*traced.values()]
        last = odd[-1] if odd else ComparedStep(())
        operations = last.operations
        checksums = [*operations.checksums] if operations else []
        described = [tuple(constant) for constant in last.constants.described]
        gathered = rank_checks.gather(
            self._transport, (checksums, described, last.shapes), where
        )
        listed, constants, shapes = map(list, zip(*gathered, strict=True))
        constants = [*map(_by_place, constants)]
        # On the sizes of a batch operations depend.
        have_equal_sizes = len({*shapes}) == 1
        if have_equal_sizes and any(own != listed[0] for own in listed):
            # Such as an axis, on which later operations depend.
            before = [
                _by_place(of_rank, _first_difference(own, listed))
                for own, of_rank, _ in gathered
            ]
            causes = _differing(before, set.intersection(*map(set, before)))
            if any(causes):
                unknown = [()] * len(listed)
                return TowerError(rank_checks.describe_steps(unknown, causes))
            other = next(own for own in listed if own != checksums)
            first = operations.first_beside(other) if operations else None
            own: Any = None if first is None else tuple(first)
            texts = rank_checks.gather(self._transport, own, where)
            return TowerError(rank_checks.describe_operations(texts))
        exchanged = [
            pair
            for step in odd
            for pair in zip(
                _numbered(map(rank_checks.without_numbers, step.exchanged)),
                step.exchanged,
                strict=True,
            )
        ]
        exchanges = rank_checks.gather(self._transport, exchanged, where)
        told = rank_checks.describe_steps(
            [[(tuple(k), name) for k, name in own] for own in exchanges],
            _differing(constants, set().union(*constants)),
        )
        sizes = "" if have_equal_sizes else rank_checks.describe_shapes(shapes)
        return TowerError(f"{told}{sizes}")


class Equal(NamedTuple):
    """A comparison of numbers over ranks: a truth value for each of them."""

    exact: tf.Tensor
    approximate: tf.Tensor


def are_equal(
    transport: Transport,
    exact: tf.Tensor,
    approximate: Sequence[int] | tf.Tensor,
    key: str,
) -> Equal:
    """Compare numbers over all ranks; return a truth value for each.

    One sum is faster than a gather, which exchanges sizes first. Ranks that
    have joined, in Horovod's sense, contribute zeros.

    Args:
        transport: connects the ranks.
        exact: 32-bit numbers.
        approximate: more numbers, which may differ by one.
        key: the key of the collective.
    """
    half = tf.constant(2**16, tf.int64)
    exact = tf.reshape(exact, [-1])
    halves = tf.concat([exact // half, tf.math.floormod(exact, half)], 0)
    nearly = tf.cast(approximate, tf.int64)
    numbers = tf.concat([halves, nearly], 0)
    sent = tf.concat([tf.ones([1], tf.int64), numbers, numbers**2], 0)
    (sums,) = transport.all_reduce([sent], key)
    # The mean of the squares equals the square of the mean only if all
    # numbers are equal. Of large numbers, both are modulo 2**64.
    size = sums[0]
    total, squares = tf.split(sums[1:], 2)
    # The most that numbers which differ by one can reach.
    slack = tf.ones_like(nearly) * (size**2 // 4)
    allowed = tf.concat([tf.zeros_like(halves), slack], 0)
    equal = abs(squares * size - total**2) <= allowed
    high, low, others = tf.split(
        equal, [tf.size(exact), tf.size(exact), tf.size(nearly)]
    )
    return Equal(high & low, others)


def outside_of_loops(exchange: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return an exchange in which a rank in a loop can meet ranks in none.

    TensorFlow adds the iteration of a loop to the keys of its collectives, but
    not in a function that it calls without inlining it.
    """
    if tf.executing_eagerly():
        return exchange
    called = {"_noinline": True}
    return tf.function(
        exchange, autograph=False, experimental_attributes=called
    )


def _first_difference(own: list[int], listed: Iterable[list[int]]) -> int:
    """Return the first index at which the lists of checksums differ."""
    return min(
        (
            index
            for other in listed
            for index, (a, b) in enumerate(itertools.zip_longest(own, other))
            if a != b
        ),
        default=len(own),
    )


def _by_place(
    described: Iterable[Sequence], end: float = math.inf
) -> dict[int, list[ConstantText]]:
    """Return the constants of a rank by place, in the rank's order.

    Args:
        described: the constants.
        end: the index of the last operation whose constants count.
    """
    texts: dict[int, list[ConstantText]] = {}
    for constant in itertools.starmap(ConstantText, described):
        if constant.used_at <= end:
            texts.setdefault(constant.place, []).append(constant)
    return texts


def _differing(
    ranks: Sequence[dict[int, list[ConstantText]]], places: Collection[int]
) -> list[list[str]]:
    """Describe the constants that differ between ranks.

    Args:
        ranks: for each rank, its constants by their places.
        places: the places to compare.
    """
    different = {
        place
        for place in places
        if not all(
            _alike(ranks[0].get(place, []), own.get(place, [])) for own in ranks
        )
    }
    return [
        [
            constant.text
            for place, constants in own.items()
            if place in different
            for constant in constants
        ]
        for own in ranks
    ]


def _alike(one: list[ConstantText], other: list[ConstantText]) -> bool:
    """Whether the constants at a place differ only by rounding."""
    return len(one) == len(other) and all(
        a.digest == b.digest
        and all(
            abs(m - n) <= 1
            for m, n in zip(a.approximate, b.approximate, strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )


def _numbered(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Number equal texts, by how many come before each."""
    seen: Counter[str] = Counter()
    numbered = []
    for text in texts:
        numbered.append((text, seen[text]))
        seen[text] += 1
    return numbered
