"""The order of steps, and of their exchanges, on all ranks.

``fit/step/global_step.py`` begins, compares and ends each step by a
``StepOrder``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.data.batches import (
    Count,
    TowerBatch,
    identity_of,
    tensors_in,
)
from keras_towers.fit.data.same_data import check_results
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.ranks.step_agreement import (
    STEP_KEY,
    UPDATE_KEY,
    StepAgreement,
)
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Structure
from keras_towers.reduction.rank_sum import sum_over_ranks
from keras_towers.transport import Transport, next_key


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
        self._begun = 0
        # Whether the step that is traced has its turn among those of all ranks.
        self._in_order: bool = transport.size > 1
        self.gate: list[tf.Tensor] = []
        self._batch: list[tf.Tensor] = []
        # The assertions that this step matches the steps of the other ranks.
        self._same_step: list[tf.Operation] | None = None
        self._exchanged: list[tf.Tensor] = []

    def begin_epoch(self) -> None:
        """Note that the next step is the first one of an epoch."""
        if self._transport.size > 1:
            self._is_first.assign(True)

    @contextlib.contextmanager
    def within_epoch(self) -> Iterator[None]:
        """Run steps in this block that do not count for the epoch."""
        if self._transport.size == 1:
            yield
            return
        was_first = self.at_first_step
        try:
            yield
        finally:
            self._is_first.assign(was_first)

    @property
    def at_first_step(self) -> bool:
        """Whether the next step is the first one of an epoch; eager only."""
        return bool(self._is_first)

    def in_first_step(self, act: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Run a function in the first step of an epoch only.

        It returns an int64 tensor.
        """
        return tf.cond(self._is_first, act, lambda: tf.zeros((), tf.int64))

    def begin_step(
        self, batch: TowerBatch, in_order: bool = True
    ) -> TowerBatch:
        """Return the batch of a step once the previous step has ended.

        Args:
            batch: the batch.
            in_order: whether all ranks take the step.
        """
        # Steps of a single process may overlap.
        self.gate = []
        self._in_order = in_order and self._transport.size > 1
        if not self._in_order:
            return batch
        self._begun = len(compat.get_default_graph().get_operations())
        self.gate = [self._turn.read_value()]
        return self._gate_batch(batch)

    def _gate_batch(self, batch: Structure) -> Structure:
        with tf.control_dependencies(self.gate):
            batch = identity_of(batch)
        self._batch = tensors_in(batch)
        return batch

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Order all operations of a step, also of one without a batch."""
        self._same_step, self._exchanged = None, []
        try:
            with tf.control_dependencies(self.gate):
                yield
        finally:
            self._same_step, self._batch = None, []

    def end_data(
        self, batches: int, model: keras.Model, shares_step: bool
    ) -> None:
        """Check that the data of all ranks ends after so many batches.

        Collective: ranks whose data goes on are in a step of the same method,
        whose first exchanges are the same.

        Args:
            batches: the batches of all executions, also where the last one had
                fewer.
            model: the model.
            shares_step: whether ranks take the same steps.
        """
        eagerly = model.run_eagerly
        compare = self.agreement.all_end if eagerly else self._all_end_in_graph
        # In the first step of an epoch ranks compare themselves in rounds, too.
        in_rounds = not (eagerly or shares_step or self.at_first_step)
        if not compare(tf.constant(batches, tf.int64), in_rounds):
            has_exact = model.steps_per_execution == 1
            number = str(batches) if has_exact else f"at most {batches}"
            raise self.agreement.mismatch_error(number)

    @functools.cached_property
    def _all_end_in_graph(self) -> Callable[[tf.Tensor, bool], tf.Tensor]:
        return tf.function(self.agreement.all_end, autograph=False)

    def check_first_results(self, values: Callable[[], Structure]) -> None:
        """Check that ranks get the same from the first eager step of an epoch.

        Args:
            values: returns what it has computed.
        """
        if self._transport.size > 1 and self.at_first_step:
            self._is_first.assign(False)
            check_results(self._transport, values())

    def end_eager_step(self) -> None:
        """Count an untraced step of all ranks."""
        self._turn.assign_add(1)

    def compare(
        self,
        step: ComparedStep,
        others: Sequence[Sequence[tf.Tensor]] = (),
        devices: Sequence[str] = (),
    ) -> None:
        """Make exchanges wait for a check that all ranks make the same ones.

        In the first step of an epoch, all ranks then get rank 0's values of the
        variables outside of the model.

        Args:
            step: what to compare.
            others: of each variable outside of the model, the handles of its
                copies on K towers, or its only handle.
            devices: the K towers' devices.
        """
        self._same_step = self.agreement.assert_same(
            step, self._batch, STEP_KEY
        )
        # A step that is refused updates nothing, so it can begin again.
        self.assert_first(self._same_step)
        if others:
            take_over = functools.partial(
                self.agreement.take_over, others, devices
            )
            with tf.control_dependencies(self._same_step):
                self.in_first_step(take_over)

    def compare_in_rounds(self, step: ComparedStep) -> None:
        """Compare the first step of an epoch, before it updates anything.

        This is for ranks that exchange nothing in a step. When they average
        weights, they compare what they exchange.
        """

        def compare() -> tf.Tensor:
            same = self.agreement.assert_same(step, (), STEP_KEY)
            with tf.control_dependencies(same):
                return tf.zeros((), tf.int64)

        with tf.control_dependencies([*self.gate, *self._batch]):
            self.gate = [self.in_first_step(compare)]

    def assert_first(self, checks: Sequence[object]) -> None:
        """Make later operations with effects wait for assertions."""
        if checks:
            with tf.control_dependencies(checks):
                self.gate = [*self.gate, tf.identity(0)]

    def exchange(
        self,
        tensors: Sequence[tf.Tensor],
        exchange: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Exchange tensors, after a check that all ranks do the same."""
        # In a step that involves no other rank, all exchanges are local.
        if not self._same_step:
            return exchange(tensors)
        with tf.control_dependencies(self._same_step):
            results = exchange(identity_of(tensors))
        # Every rank takes part, even if it does not use the results.
        self._exchanged += tensors_in(results)
        return results

    def end_step(self, result: object) -> Structure:
        """Allow the next step to begin, and return the result of this step."""
        if not self._in_order:
            return result
        operations = compat.get_default_graph().get_operations()[self._begun :]
        effects = [op for op in operations if op.op_def.is_stateful]
        last = [*tensors_in(result), *effects, *done_by_all(self._exchanged)]
        with tf.control_dependencies(last):
            done = [
                self._turn.assign_add(1, read_value=False),
                self._is_first.assign(False, read_value=False),
            ]
        # They would keep the graph.
        self.gate, self._exchanged = [], []
        with tf.control_dependencies(done):
            return identity_of(result)

    def count(self, batch: TowerBatch, here: Count) -> Structure:
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
    ) -> list[list[Any]]:
        """Reduce K lists of N gradients, if all ranks have the same ones.

        Args:
            described: describes each gradient.
            tower_grads: the gradients.
            reduction: reduces them.
        """
        if not tower_grads[0]:
            return [list(grads) for grads in tower_grads]
        if self._transport.size == 1:
            return reduction(tower_grads)
        same_step = self._same_step
        if same_step is None:
            # A step may do this for each of several optimizers.
            key = next_key(UPDATE_KEY)
            step = ComparedStep.of_exchanges(described)
            same_step = self.agreement.assert_same(step, self._batch, key)
        with tf.control_dependencies(same_step):
            return reduction(identity_of(tower_grads))


def row_of_rank(value: tf.Tensor, transport: Transport) -> tf.Tensor:
    """Return a row per rank: the value for this rank, 0 for other ranks."""
    zeros = tf.zeros_like(value)
    return tf.stack(
        [value if r == transport.rank else zeros for r in range(transport.size)]
    )


def done_by_all(tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Return a tensor that depends on all exchanges of a rank.

    The rank may not use their results. TensorFlow would then prune exchanges
    without side effects that feed only a control dependency.
    """
    if not tensors:
        return []
    first = [tf.reshape(tensor, [-1])[:1] for tensor in tensors]
    return [tf.raw_ops.Assert(condition=compat.unknown(True), data=first)]


def _end_data() -> tf.Tensor:
    return next(iter(tf.data.Dataset.from_tensors(0).take(0)))
