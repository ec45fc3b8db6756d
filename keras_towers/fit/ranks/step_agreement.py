"""Agreement of ranks on the step that they take, and on its data.

``compared_step.py`` has what ranks compare; ``step_order.py`` runs the
comparison before the first exchange.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_towers.fit.context import step_errors
from keras_towers.fit.data.same_data import (
    different_numbers,
    digest_of,
    first_far,
    refuse_other_batch,
)
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.weights.copies import copy_first, read_handle
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import rank_checks
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
# In place of the digest of data that ranks do not compare.
_NO_DATA = (0, 0)


_OTHER_TEXTS = (
    "a variable of texts, which no layer of the model has, differs between the "
    "ranks: give it the same value on all of them"
)


class StepAgreement:
    """Checks that the ranks' steps match.

    If the steps of two ranks had different collectives, the ranks would wait
    for each other.

    Args:
        transport: connects the ranks.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        # A 32-bit number of what this rank has written between two calls.
        self._writes = compat.hidden_variable(0, tf.int64)
        self._noted_writes = 0
        # The steps of this rank, by what others compare of them.
        self._traced: dict[tuple[int, ...], ComparedStep] = {}

    def note_writes(self, number: int) -> None:
        """Let the next steps compare what ranks have written before them.

        Args:
            number: a 32-bit number of it; 0: nothing.
        """
        if number != self._noted_writes:
            self._writes.assign(number)
            self._noted_writes = number

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
        name, data = step.numbers, step.fingerprint
        # The last one is the one that was traced last.
        self._traced.pop(name, None)
        # Without what a graph has that may be freed.
        text = dataclasses.replace(step.text, reals=())
        self._traced[name] = dataclasses.replace(
            step, text=text, fingerprint=None
        )
        if tf.executing_eagerly():
            return self._assert_same_eagerly(step)
        # 0 once ranks have found that real numbers differ by rounding only.
        reals = compat.hidden_variable(name[1], tf.int64)
        # At the end of the data there is no batch, and the step is cancelled.
        # TensorFlow's collectives hang if they are cancelled while they run.
        with tf.control_dependencies(after):
            of_data = tf.constant(_NO_DATA, tf.int64)
            of_data = of_data if data is None else data.numbers
            own = [name[0], reals.read_value(), self._writes.read_value()]
            numbers = [own, of_data]
            equal = outside_of_loops(
                lambda: are_equal(self._transport, tf.concat(numbers, 0), key)
            )()
        same_text, same_reals, same_writes, *same_data = tf.unstack(equal)

        def are_near() -> tf.Tensor:
            values = step.text.reals_and_slack
            sample = tf.numpy_function(values, [], [tf.float64] * 2)
            near = self._first_far(sample, f"{key}.reals") == 0
            number = tf.where(near, tf.zeros((), tf.int64), reals)
            with tf.control_dependencies([reals.assign(number)]):
                return tf.identity(near)

        same_step = tf.cond(
            same_text & ~same_reals, are_near, lambda: same_text
        )
        assertions = [
            tf.debugging.Assert(
                same_step, [f"{rank_checks.OTHER_STEP} {name}"]
            ),
            tf.debugging.Assert(
                same_writes | ~same_step, [rank_checks.OTHER_WRITES]
            ),
        ]
        if data is None:
            return assertions
        # Other steps may have other data: say that the steps differ.
        with tf.control_dependencies(assertions):
            odd = tf.cond(
                same_step & ~tf.reduce_all(same_data),
                lambda: self._first_far(data.sample(), f"{key}.data"),
                lambda: tf.zeros((), tf.int64),
            )
            return assertions + refuse_other_batch(odd)

    def _first_far(self, sample: Sequence[tf.Tensor], key: str) -> tf.Tensor:
        values, slack = sample
        return outside_of_loops(
            lambda: first_far(self._transport, values, slack, key)
        )()

    def _assert_same_eagerly(self, step: ComparedStep) -> list[tf.Operation]:
        """Compare steps that run eagerly, of which only the data is known."""
        data = step.fingerprint
        digest = [] if data is None else data.numbers.numpy().tolist()
        own = [*step.numbers, self._noted_writes, *digest]
        ranks = rank_checks.gather(self._transport, own, _COMPARES)
        if any(of_rank[:2] != own[:2] for of_rank in ranks):
            raise self.mismatch_error(said=f"{step.numbers}")
        same_writes = all(of_rank[2] == own[2] for of_rank in ranks)
        tf.debugging.Assert(same_writes, [rank_checks.OTHER_WRITES])
        if data is None or all(of_rank == own for of_rank in ranks):
            return []
        return refuse_other_batch(self._first_far(data.sample(), "data"))

    def all_end(self, batches: Any, in_rounds: bool = False) -> tf.Tensor:
        """Whether the data of all ranks ends after so many batches.

        A rank whose data goes on compares its next step instead; in rounds of
        local SGD, the update that ends its round.
        """
        key = next_key(UPDATE_KEY) if in_rounds else STEP_KEY
        ended = tf.convert_to_tensor([_END, batches, 0, *_NO_DATA], tf.int64)
        if tf.executing_eagerly():
            own = ended.numpy().tolist()
            ranks = rank_checks.gather(self._transport, own, _COMPARES)
            return tf.constant(all(of_rank == own for of_rank in ranks))
        return tf.reduce_all(
            outside_of_loops(lambda: are_equal(self._transport, ended, key))()
        )

    def take_over(
        self, variables: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
    ) -> tf.Tensor:
        """Assign rank 0's values to variables, unless all are the same.

        Texts are not sent: the step fails if they differ.

        Args:
            variables: of each variable, the handles of its copies on K towers,
                or its only handle.
            devices: the K towers' devices.
        """
        every = [read_handle(handles[0]) for handles in variables]
        sent = [k for k, v in enumerate(every) if v.dtype != tf.string]
        values = [every[k] for k in sent]
        texts = [value for value in every if value.dtype == tf.string]
        digests = tf.concat([digest_of(values), digest_of(texts)], 0)
        equal = are_equal(self._transport, digests, next_key(UPDATE_KEY))
        same_texts = tf.reduce_all(equal[2:]) if texts else tf.constant(True)
        checks = step_errors.assert_for_user(same_texts, _OTHER_TEXTS, [])

        def send() -> tf.Tensor:
            key = next_key("broadcast")
            received = self._transport.broadcast(values, key)
            for k, value in zip(sent, received, strict=True):
                handles = variables[k]
                tf.raw_ops.AssignVariableOp(resource=handles[0], value=value)
                copy_first(handles, devices[: len(handles)])
            return tf.ones((), tf.int64)

        with tf.control_dependencies(checks):
            same = tf.reduce_all(equal[:2])
        return tf.cond(same, lambda: tf.zeros((), tf.int64), send)

    def mismatch_error(
        self, batches: str | None = None, said: str = ""
    ) -> TowerError:
        """Return an error that names the differences. Collective.

        Args:
            batches: after how many batches this rank's data has ended; None: it
                is in a step.
            said: the error of that step; empty: unknown.
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
        # Others may have had the step that fails on this rank, too.
        odd += [step for name, step in traced.items() if f"{name}" in said]
        last = odd[-1] if odd else ComparedStep.of_exchanges(())
        text = last.text
        gather = functools.partial(
            rank_checks.gather, self._transport, where=where
        )
        own = len(text.checksums), last.shapes
        lengths, shapes = zip(*gather(own), strict=True)
        # The first line that differs, by the checksums of those before it.
        first, end = 0, max(lengths)
        while first < end:
            middle = (first + end) // 2
            if len({*gather(text.first(middle + 1))}) == 1:
                first = middle + 1
            else:
                end = middle
        line = text.line(first)
        own_line: Any = None if line is None else tuple(line)
        lines: Any = gather(own_line)
        told = rank_checks.describe_lines(lines)
        if len({*shapes}) > 1:
            told += rank_checks.describe_shapes(shapes)
        return TowerError(told)


def are_equal(transport: Transport, numbers: tf.Tensor, key: str) -> tf.Tensor:
    """Compare 32-bit numbers over all ranks; return a truth value for each.

    One sum is faster than a gather, which exchanges sizes first. Ranks that
    have joined, in Horovod's sense, contribute zeros.

    Args:
        transport: connects the ranks.
        numbers: N numbers.
        key: the key of the collective.
    """
    half = tf.constant(2**16, tf.int64)
    numbers = tf.reshape(numbers, [-1])
    halves = tf.concat([numbers // half, tf.math.floormod(numbers, half)], 0)
    sent = tf.concat([tf.ones([1], tf.int64), halves, halves**2], 0)
    (sums,) = transport.all_reduce([sent], key)
    # The mean of the squares equals the square of the mean only if all
    # numbers are equal.
    size = sums[0]
    total, squares = tf.split(sums[1:], 2)
    high, low = tf.split(squares * size == total**2, 2)
    return high & low


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
