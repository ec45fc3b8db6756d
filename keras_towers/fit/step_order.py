"""Order and agreement of steps, and of their collectives, over all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import step_errors
from keras_towers.fit.data.batches import TowerBatch, identity_of, tensors_in
from keras_towers.fit.data.same_data import (
    SIZE,
    check_batch,
    check_results,
    different_data,
    different_numbers,
)
from keras_towers.fit.weights.copies import copy_first, read_handle
from keras_towers.reduction import sum_over_ranks
from keras_towers.rendezvous import rank_checks
from keras_towers.transport import Transport, next_key

_BATCH = "they have different examples in a batch after the first one"
# The steps of a rank run one after another, and each compares itself once. So
# ranks that trace other steps, or have no further batch, meet under one key.
_KEY = "kt.step"
# Of updates that are compared by themselves, as at the end of a round.
_UPDATE = "gradients"
# In place of the digest of a step: the data has ended.
_END = -1


class StepOrder:
    """Orders the steps of a rank, whose exchanges wait until the steps match.

    TensorFlow may overlap steps that share no variable; two collectives would
    then be in flight with the same key. And if the steps of two ranks had
    different collectives, the ranks would wait for each other.

    Attributes:
        gate: the tensors for which operations with effects wait: those without
            which a step does not begin, and its assertions so far.
        agreement: compares the ranks' steps.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._turn = compat.hidden_variable(0, tf.int64)
        self.agreement: StepAgreement = StepAgreement(transport)
        self._is_first = compat.hidden_variable(False)
        self._results_are_first = False
        self._begun = 0
        self.gate: list[Any] = []
        self._batch: list[Any] = []
        # The assertions that this step matches the steps of the other ranks.
        self._same_step: list[Any] | None = None
        self._exchanged: list[Any] = []

    def begin_epoch(self) -> None:
        """Note that the next step is the first one of an epoch."""
        if self._transport.size > 1:
            self._is_first.assign(True)
            self._results_are_first = True

    @contextlib.contextmanager
    def within_epoch(self) -> Iterator[None]:
        """Leave an epoch as it is, whatever steps this block makes."""
        if self._transport.size == 1:
            yield
            return
        was_first = bool(self._is_first)
        try:
            yield
        finally:
            self._is_first.assign(was_first)

    def in_first_step(self, act: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Act in the first step of an epoch only; return the int64 result."""
        result = tf.cond(self._is_first, act, lambda: tf.zeros((), tf.int64))
        if tf.executing_eagerly():
            self._is_first.assign(False)
        return result

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
        self._same_step, self._exchanged = None, []
        try:
            with tf.control_dependencies(self.gate):
                yield
        finally:
            self._same_step, self._batch = None, []

    def begin_checked(self, data: Any, batch: Any) -> Any:
        """Return the batch of a step, once its data is checked."""
        # Once inlined, functions that get this batch wait only for the batch.
        with tf.control_dependencies(self.gate):
            self.gate = [self.check_first(data)]
        return self._gate_batch(batch)

    def check_first(self, data: Any) -> tf.Tensor:
        """Check that the first data of an epoch is the same on all ranks."""
        check = functools.partial(check_batch, self._transport, data)
        return self.in_first_step(outside_of_loops(check))

    def check_first_results(self, values: Callable[[], Any]) -> None:
        """Check that the first eager step of an epoch does the same on all.

        Args:
            values: returns what it has computed.
        """
        if self._transport.size > 1 and self._results_are_first:
            self._results_are_first = False
            check_results(self._transport, values())

    def compare(
        self,
        step: ComparedStep,
        others: Sequence[Sequence[Any]] = (),
        devices: Sequence[str] = (),
    ) -> None:
        """Make exchanges wait for a check that all ranks make the same ones.

        In the first step of an epoch all ranks then get rank 0's values of the
        variables outside of the model.

        Args:
            step: what to compare.
            others: of each variable outside of the model, the handles of its
                copies on K towers, or its only handle.
            devices: the K towers' devices.
        """
        self._same_step = self.agreement.assert_same(step, self._batch, _KEY)
        if others:
            take_over = functools.partial(
                self.agreement.take_over, others, devices
            )
            with tf.control_dependencies(self._same_step):
                self.in_first_step(take_over)

    def assert_first(self, checks: Sequence[Any]) -> None:
        """Let later operations with effects wait for assertions."""
        if checks:
            with tf.control_dependencies(checks):
                self.gate = [*self.gate, tf.identity(0)]

    def exchange(
        self,
        tensors: Sequence[Any],
        exchange: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Exchange tensors, after a check that all ranks do the same."""
        # In a step that involves no other rank, all exchanges are local.
        if not self._same_step:
            return exchange(tensors)
        with tf.control_dependencies(self._same_step):
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
            done = [
                self._turn.assign_add(1, read_value=False),
                self._is_first.assign(False, read_value=False),
            ]
        with tf.control_dependencies(done):
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
        # Without examples, read from data that has ended.
        self.gate = [tf.cond(total <= 0, _end_data, lambda: 0)]
        start = tf.reduce_sum(counts[: self._transport.rank])
        return self._gate_batch(batch._replace(total=total, start=start))

    def reduce(
        self,
        described: Sequence[str],
        tower_grads: Sequence[Sequence[Any]],
        reduction: Callable[[Sequence[Sequence[Any]]], list[list[Any]]],
        step: ComparedStep | None = None,
    ) -> list[list[Any]]:
        """Reduce K lists of N gradients, if all ranks have the same ones.

        Args:
            described: describes each gradient.
            tower_grads: the gradients.
            reduction: reduces them.
            step: a step that each rank has made by itself, to be compared, too.
        """
        if not tower_grads[0]:
            return [list(grads) for grads in tower_grads]
        if self._transport.size == 1:
            return reduction(tower_grads)
        same_step = self._same_step
        if same_step is None:
            # Their examples may differ.
            step = dataclasses.replace(
                step or ComparedStep(()), exchanged=described, fingerprint=None
            )
            # A step may do this for each of several optimizers.
            key = next_key(_UPDATE)
            same_step = self.agreement.assert_same(step, self._batch, key)
        with tf.control_dependencies(same_step):
            return reduction(identity_of(tower_grads))


def outside_of_loops(exchange: Callable[[], Any]) -> Callable[[], Any]:
    """Return an exchange in which ranks in a loop meet ranks in none.

    TensorFlow adds the iteration of a loop to the keys of its collectives, but
    not in a function that it calls without inlining it.
    """
    if tf.executing_eagerly():
        return exchange
    called = {"_noinline": True}
    return tf.function(
        exchange, autograph=False, experimental_attributes=called
    )


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
    return [tf.raw_ops.Assert(condition=compat.unknown(True), data=first)]


def _end_data() -> tf.Tensor:
    return next(iter(tf.data.Dataset.from_tensors(0).take(0)))


class OperationText(NamedTuple):
    """Describes an operation of a step.

    Attributes:
        result: its type, and the dtype and shape of what it returns.
        attributes: its settings, by their names.
        line: the line of code that has added it.
    """

    result: str
    attributes: dict[str, str]
    line: str

    def __str__(self) -> str:
        return f"{self.result} of {self.line}"


class ConstantText(NamedTuple):
    """Describes a constant of a step.

    Attributes:
        place: where the step uses it: a number that is equal on all ranks.
        digest: of its shape and dtype, and of integers and booleans.
        approximate: of real numbers: integers that differ by at most one
            between ranks whose numbers differ by rounding only.
        text: its first values, and the line of code that has added it.
    """

    place: int
    digest: int
    approximate: Sequence[int]
    text: str


class Operations(Protocol):
    """The operations of a step.

    Attributes:
        checksum: 32 bits of the step.
        checksums: of each operation, in their order.
    """

    checksum: int

    @property
    def checksums(self) -> list[int]: ...

    def first_beside(self, others: Sequence[int]) -> OperationText | None:
        """Return the first operation that others, by checksums, do not have."""
        ...


@dataclasses.dataclass(frozen=True)
class Constants:
    """The numbers among the constants of a step.

    Attributes:
        digest: a checksum of shapes and dtypes, and of the values of integers
            and booleans.
        approximate: three integers that differ by at most one between ranks
            whose real numbers differ by rounding only.
        describe: describes each of them.
    """

    digest: int = 0
    approximate: tuple[int, int, int] = (0, 0, 0)
    describe: Callable[[], Sequence[ConstantText]] = tuple


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedStep:
    """What the ranks compare of a step.

    Attributes:
        exchanged: describes what they exchange, in its order.
        operations: its operations, which must be the same, too, on ranks that
            have traced it for the same specs; None: they are not compared.
        constants: its constants, which are compared with its operations.
        spec: the specs of the batch for which it was traced.
        fingerprint: integers of the global batch, which differ by at most one
            between ranks with the same batch; None: each has its own.
    """

    exchanged: Sequence[str]
    operations: Operations | None = None
    constants: Constants = Constants()
    spec: Any = None
    fingerprint: tf.Tensor | None = None

    @functools.cached_property
    def numbers(self) -> tuple[list[int], Sequence[int]]:
        """Numbers that are equal on all ranks, and that are nearly equal."""
        kinds = map(rank_checks.without_numbers, self.exchanged)
        leaves = tf.nest.flatten(self.spec)
        shapes = [str(getattr(leaf, "shape", None)) for leaf in leaves]
        exact = [
            zlib.crc32("\n".join(kinds).encode()),
            0 if self.operations is None else self.operations.checksum,
            self.constants.digest,
            zlib.crc32(" ".join(shapes).encode()),
        ]
        return exact, self.constants.approximate

    def is_like(self, exact: Sequence[int], approximate: Sequence[int]) -> bool:
        """Whether it is like another one, given that one's numbers."""
        own, nearly = self.numbers
        *same, same_sizes = (a == b for a, b in zip(own, exact, strict=True))
        pairs = zip(nearly, approximate, strict=True)
        same.append(all(abs(a - b) <= 1 for a, b in pairs))
        return all(same) or (same[0] and not same_sizes)


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
        self, step: ComparedStep, after: Sequence[Any], key: str
    ) -> list[Any]:
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
        self._traced[name] = step
        if tf.executing_eagerly():
            rank_checks.gather(self._transport, None, "compares the steps")
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
        if tf.executing_eagerly():
            if not same_step:
                raise self.mismatch_error()
            return []
        assertions = [tf.debugging.Assert(same_step, [rank_checks.OTHER_STEP])]
        if data is None:
            return assertions
        same_data = tf.reduce_all(equal.approximate[number:])
        # Other steps may have other data: say that the steps differ.
        with tf.control_dependencies(assertions):
            return assertions + step_errors.assert_for_user(
                same_data, str(different_data(_BATCH)), []
            )

    def all_end(
        self, batches: Any, after: Sequence[Any], in_rounds: bool = False
    ) -> tf.Tensor:
        """Whether the data of all ranks has ended after so many batches.

        A rank whose data goes on compares its next step instead, or in rounds
        of local SGD the update that ends its round.
        """
        key = next_key(_UPDATE) if in_rounds else _KEY
        ended = [_END, batches, 0, 0]
        with tf.control_dependencies(after):
            equal = self._compare(ended, Constants().approximate, key=key)
            return tf.reduce_all(equal.exact)

    def take_over(
        self, variables: Sequence[Sequence[Any]], devices: Sequence[str]
    ) -> tf.Tensor:
        """Assign rank 0's values to variables, unless they are the same.

        Args:
            variables: of each variable, the handles of its copies on K towers,
                or its only handle.
            devices: the K towers' devices.
        """
        values = [read_handle(handles[0]) for handles in variables]
        rows = [tf.fingerprint(tf.reshape(value, [1, -1])) for value in values]
        digest = tf.reshape(tf.fingerprint(tf.concat(rows, 1)), [2, 4])
        digest = tf.cast(tf.bitcast(digest, tf.uint32), tf.int64)
        key = next_key(_UPDATE)
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
        exact: Sequence[Any],
        constants: Sequence[int],
        data: tf.Tensor | None = None,
        key: str = _KEY,
    ) -> Equal:
        if data is None:
            data = tf.zeros(SIZE, tf.int64)
        mine = tf.convert_to_tensor(exact, tf.int64)
        nearly = tf.concat([tf.constant(constants, tf.int64), data], 0)
        return outside_of_loops(
            lambda: are_equal(self._transport, mine, nearly, key)
        )()

    @staticmethod
    def is_mismatch(error: Exception) -> bool:
        """Whether an error says that the steps of ranks differ."""
        return rank_checks.OTHER_STEP in str(error)

    def mismatch_error(self, batches: str | None = None) -> TowerError:
        """Return an error that names the differences. Collective.

        Args:
            batches: after how many batches this rank's data has ended; None: it
                is in a step.
        """
        where, traced = "compares the steps", self._traced
        ranks = rank_checks.gather(self._transport, ([*traced], batches), where)
        ends = [of_rank for _, of_rank in ranks]
        if set(ends) != {None}:
            return different_numbers(["more" if n is None else n for n in ends])
        common = set.intersection(*({*map(tuple, of)} for of, _ in ranks))
        # A rank whose steps others have had, too, is in one of these.
        odd = [step for name, step in traced.items() if name not in common]
        odd = odd or [*traced.values()]
        last = odd[-1] if odd else ComparedStep(())
        operations = last.operations
        checksums = operations.checksums if operations else []
        described = [tuple(constant) for constant in last.constants.describe()]
        gathered = rank_checks.gather(
            self._transport, (checksums, described), where
        )
        listed = [of_rank for of_rank, _ in gathered]
        constants = [_by_place(of_rank) for _, of_rank in gathered]
        if any(of_rank != listed[0] for of_rank in listed):
            # Such as an axis, on which later operations depend.
            causes = _differing(
                constants, set.intersection(*map(set, constants))
            )
            if any(causes):
                unknown = [()] * len(listed)
                return TowerError(rank_checks.describe_steps(unknown, causes))
            other = next(of for of in listed if of != checksums)
            first = operations and operations.first_beside(other)
            own = first and tuple(first)
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
        return TowerError(
            rank_checks.describe_steps(
                [[(tuple(k), name) for k, name in of] for of in exchanges],
                _differing(constants, set().union(*constants)),
            )
        )


class Equal(NamedTuple):
    """Which numbers are equal on all ranks: a truth value for each of them."""

    exact: tf.Tensor
    approximate: tf.Tensor


def are_equal(
    transport: Transport, exact: tf.Tensor, approximate: Any, key: str
) -> Equal:
    """Whether all ranks have the same numbers, for each of them.

    Args:
        transport: connects the ranks.
        exact: 32-bit numbers.
        approximate: more numbers, which may differ by one.
        key: the key of the collective.
    """
    # One sum is faster than a gather, which exchanges sizes first. Ranks that
    # have joined, as Horovod calls it, contribute zeros.
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


def _by_place(described: Iterable[Any]) -> dict[int, list[ConstantText]]:
    """Return the constants of a rank by their places, in its order."""
    found: dict[int, list[ConstantText]] = {}
    for constant in itertools.starmap(ConstantText, described):
        found.setdefault(constant.place, []).append(constant)
    return found


def _differing(
    ranks: Sequence[dict[int, list[ConstantText]]], places: Collection[int]
) -> list[list[str]]:
    """Describe the constants at some places where ranks have different ones.

    Args:
        ranks: for each rank, its constants by their places.
        places: the places to compare.
    """
    different = {
        place
        for place in places
        if not all(
            _alike(ranks[0].get(place, []), of.get(place, [])) for of in ranks
        )
    }
    return [
        [
            constant.text
            for place, constants in of.items()
            if place in different
            for constant in constants
        ]
        for of in ranks
    ]


def _alike(one: list[ConstantText], other: list[ConstantText]) -> bool:
    """Whether constants of a place differ by rounding only."""
    return len(one) == len(other) and all(
        a.digest == b.digest
        and all(
            abs(m - n) <= 1
            for m, n in zip(a.approximate, b.approximate, strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )


def _numbered(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Return texts with the number of equal ones before each."""
    seen: Counter[str] = Counter()
    numbered = []
    for text in texts:
        numbered.append((text, seen[text]))
        seen[text] += 1
    return numbered
