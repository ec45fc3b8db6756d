"""The state that the replicas of a model share, and operations on it."""

from __future__ import annotations

import copy
import enum
from typing import Any, Self

import tensorflow as tf

from keras_towers.replicas.accumulators import DenseAccumulator, GradientSpec
from keras_towers.replicas.named_resources import (
    Queue,
    RunFunction,
    TracedFunctions,
    run_flat,
    variable,
)
from keras_towers.replicas.replica_counts import Quorum

END: int = 1 << 62
"""The last step, for which no gradient is computed."""


class ReplicaEvent(enum.IntEnum):
    """An event for the coordinator."""

    ARRIVED = 0
    """A replica has pushed its gradients."""
    UPDATED = 1
    """An update that began before its gradients arrived has been made."""
    RETURNED = 2
    """A replica goes on after a restart."""
    LOST = 3
    """A replica has died or stopped."""
    LEFT = 4
    """A replica has no more data."""
    STOPPED = 5
    """A replica has stopped the training: no update follows."""
    FLUSH = 6
    """The gradients that have arrived are to be applied, be they too few."""
    SYNC = 7
    """A thread waits until all earlier events have been handled."""
    END = 8
    """The coordinator is to end."""


class ReplicaGroup:
    """The state that a model's replicas share, and what is done with it.

    Most methods add operations to a ``tf.function``; at the end are those by
    which replicas and their coordinator act at once.

    A replica that has computed its share of an update waits for the next global
    step. With shared tokens it waits for a token instead, the right to compute
    one gradient; its value is the global step at which it was handed out. The
    first gradient of each replica needs none, so that no other can take it.

    The state is on one device, in resources with names, which the functions of
    several processes can share.

    Args:
        name: of the resources.
        device: where they are.
        quorum: how many gradients an update has, of how many replicas.
        run: runs a traced function.
        early: whether updates begin before their gradients have arrived. Every
            replica then computes one gradient of each update.
    """

    def __init__(
        self,
        name: str,
        device: str,
        quorum: Quorum,
        run: RunFunction = run_flat,
        early: bool = False,
    ):
        self.calls: TracedFunctions = TracedFunctions(run)
        self.quorum = quorum
        self.early = early
        self._name = name
        self._device = device
        self.step: tf.Variable = self._number("step")
        # Shared tokens; or, for each replica, a new step for which it waits.
        self._steps = [
            Queue(f"{name}/steps_{index}", device)
            for index in range(1 if quorum.shared else quorum.replicas)
        ]
        # For each replica and chunk of the weights, the step that may read it.
        self._chunks: dict[tuple[int, int], Queue] = {}
        self._events = Queue(f"{name}/events", device, 4)
        # Part of every average: the replicas that have pushed all gradients.
        arrivals = GradientSpec(
            "arrivals", (quorum.replicas,), tf.float64, False, device
        )
        self._arrivals = DenseAccumulator(f"{name}/arrivals", arrivals, "SUM")
        # For each replica: the step of its gradients, how many it has pushed in
        # this fit, and how many of these before that step.
        replicas = range(quorum.replicas)
        self._local = [self._number(f"local_{index}") for index in replicas]
        self._pushed = [self._number(f"pushed_{index}") for index in replicas]
        self._before = [self._number(f"before_{index}") for index in replicas]

    def _number(self, name: str) -> tf.Variable:
        return variable(f"{self._name}/{name}", self._device, (), tf.int64)

    def start_gradient(
        self, replica: int, token: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Begin to compute a gradient with the current weights."""
        local, before = self._local[replica], self._before[replica]
        with tf.device(self._device):
            # A token may have been handed out long ago.
            step = self.step.read_value() if token is None else token
            is_first = tf.not_equal(step, local.read_value())
            pushed = self.read_pushed(replica)
            count = tf.where(is_first, pushed, before.read_value())
            with tf.control_dependencies([before.assign(count)]):
                return tf.identity(local.assign(step))

    def wait_for_step(self, replica: int) -> tf.Tensor:
        """Wait for the next step, ``END`` at the end, and ``start_gradient``.

        The step may be the same one, if the replica computes more than one of
        its gradients.
        """
        token = None
        if self.quorum.shared:
            step = token = self._wait_for_token(replica)
        else:
            step = self._wait_in(self._steps[replica], replica)
        with (
            tf.control_dependencies([step]),
            tf.control_dependencies([self.start_gradient(replica, token)]),
        ):
            return tf.identity(step)

    def _wait_for_token(self, replica: int) -> tf.Tensor:
        with tf.device(self._device):
            step = self.step.read_value()
            is_first = tf.equal(self.read_pushed(replica), 0)
            is_first &= self._local[replica].read_value() < step
            return tf.cond(
                is_first, lambda: step, lambda: self._steps[0].get()[0]
            )

    def wait_for_chunk(self, replica: int, chunk: int) -> tf.Tensor:
        """Wait for a chunk of the next step's weights."""
        return self._wait_in(self._chunk(replica, chunk), replica)

    def _chunk(self, replica: int, chunk: int) -> Queue:
        if (replica, chunk) not in self._chunks:
            name = f"{self._name}/chunk_{chunk}_{replica}"
            self._chunks[replica, chunk] = Queue(name, self._device)
        return self._chunks[replica, chunk]

    def _wait_in(self, queue: Queue, replica: int) -> tf.Tensor:
        quota = self.quorum.quotas[replica]
        with tf.device(self._device):
            due = self._local[replica].read_value()
            if quota == 1:
                # The replica may not have pushed its gradient yet.
                due += 1
            else:
                pushed = self.read_pushed(replica)
                pushed -= self._before[replica].read_value()
                due += tf.cast(pushed >= quota, tf.int64)
            return queue.wait_for(due, self.step.read_value)

    def number_gradient(self, replica: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return a gradient's step and number, for accumulators."""
        most = self.quorum.max_per_replica
        with tf.device(self._device):
            count = tf.math.floormod(
                self.read_pushed(replica), tf.constant(most, tf.int64)
            )
            return self._local[replica].read_value(), replica * most + count

    def read_pushed(self, replica: int) -> tf.Tensor:
        """Read how many gradients a replica has pushed in this ``fit``."""
        with tf.device(self._device):
            return self._pushed[replica].read_value()

    def arrive(self, replica: int) -> None:
        """Count a replica that has pushed all gradients of a step."""
        with tf.device(self._device):
            step = self._local[replica].read_value()
            one = tf.one_hot(replica, self.quorum.replicas, dtype=tf.float64)
            # A replica that dies in between computes this gradient again, and
            # one that dies after the count tells of it when it comes back.
            with tf.control_dependencies([self._arrivals.push(one, step)]):
                counted = self._pushed[replica].assign_add(
                    tf.ones((), tf.int64), read_value=False
                )
            if not self.early:
                with tf.control_dependencies([counted]):
                    self._put(ReplicaEvent.ARRIVED, replica)

    def start_over(self) -> tf.Tensor:
        """Start over at a new step, without earlier events or arrivals."""
        # No other process may use the group at the same time.
        for queue in [*self._steps, self._events]:
            queue.clear()
        with tf.device(self._device):
            before = self.step.read_value()
            for local in self._local:
                local.assign(before, read_value=False)
            for count in [*self._pushed, *self._before]:
                count.assign(tf.zeros((), tf.int64), read_value=False)
            step = self._increment_step()
            emptied = self._arrivals.advance_to(step, True)
            published = self._publish(step, self.quorum.replicas)
            with tf.control_dependencies([emptied, published]):
                return tf.identity(step)

    def take_arrivals(self, count: tf.Tensor) -> tf.Tensor:
        """Wait for arrivals, and take all: shape [T], by replica."""
        with tf.device(self._device):
            arrivals: Any = self._arrivals.take_average(count)
            return tf.cast(arrivals, tf.int64)

    def advance(self) -> tf.Operation:
        """Increment the global step, for which replicas wait."""
        if not self.early:
            return self._publish(self._increment_step())
        # Sent first: a replica that goes on may leave at once.
        updated = self._put(ReplicaEvent.UPDATED, 0)
        with tf.control_dependencies([updated]):
            return self._publish(self._increment_step())

    def _increment_step(self) -> tf.Tensor:
        with tf.device(self._device):
            return tf.identity(self.step.assign_add(tf.ones((), tf.int64)))

    def _publish(self, step: tf.Tensor, without_token: int = 0) -> tf.Operation:
        """Let replicas go on with a step, which is the global step now.

        Args:
            step: the step.
            without_token: how many of its gradients need no shared token.
        """
        with tf.device(self._device):
            if not self.quorum.shared:
                return tf.group(*(q.put_if_empty(step) for q in self._steps))
            number = self.quorum.max_per_replica - without_token
            tokens = tf.fill([number], step)
            return tf.group(self._steps[0].put_many(tokens))

    def publish_chunk(self, chunk: int) -> None:
        """Publish that a chunk of the next step's weights is ready."""
        with tf.device(self._device):
            step = self.step.read_value() + 1
            for replica in range(self.quorum.replicas):
                self._chunk(replica, chunk).put(step)

    def _put(self, event: ReplicaEvent, replica: int) -> tf.Operation | None:
        with tf.device(self._device):
            step = self._local[replica].read_value()
            pushed = self._pushed[replica].read_value()
            return self._events.put(int(event), replica, step, pushed)

    # ---- at once -------------------------------------------------------------

    def run_by(self, run: RunFunction) -> Self:
        """Return the same group, which runs its operations differently."""
        other = copy.copy(self)
        other.calls = TracedFunctions(run)
        return other

    def send(self, event: ReplicaEvent, replica: int = 0) -> None:
        """Send an event to the coordinator."""
        self.calls((event, replica), lambda: self._put(event, replica))

    def next_event(self) -> tuple[ReplicaEvent, int, int, int]:
        """Wait for an event.

        Returns:
            It, the replica, its local step, and how many gradients it had
            pushed in this ``fit``.
        """
        event, *numbers = map(int, self.calls("next", self._events.get))
        replica, step, pushed = numbers
        return ReplicaEvent(event), replica, step, pushed

    def send_end(self, replica: int) -> None:
        """End a replica; with shared tokens, the next one that waits."""
        own = [q for (owner, _), q in self._chunks.items() if owner == replica]

        def body() -> None:
            with tf.device(self._device):
                step = self.step.read_value() + 1
            for chunk in own:
                chunk.put(step)
            steps = self._steps[0 if self.quorum.shared else replica]
            steps.put(tf.constant(END, tf.int64))

        self.calls(("end", replica, len(own)), body)

    def send_end_to_all(self) -> None:
        """End all replicas."""
        for replica in range(self.quorum.replicas):
            self.send_end(replica)

    def initialize(self) -> None:
        """Set the global step to 0; one process does so before training."""

        def body() -> None:
            with tf.device(self._device):
                self.step.assign(tf.zeros((), tf.int64), read_value=False)

        self.calls("initialize", body)

    def global_step(self) -> int:
        """Return the number of updates so far."""
        (step,) = self.calls("step", self.step.read_value)
        return int(step)

    def come_back(self, replica: int) -> int:
        """Let a replica go on after a restart; ``wait_for_step`` follows.

        Of a step for which it computes two gradients, it may have been lost:

            start -- compute -- push -- start -- compute -- push -- next step
              |________________|          |________________|
               begin step again            go on with the second

        Where none is pushed, it takes one off the step that it is in, so that
        ``wait_for_step`` gives it the same one. A shared token that it had is
        lost with it, and handed out anew.

        Returns:
            How many gradients it has pushed in this ``fit``.
        """

        def body() -> tf.Tensor:
            with tf.device(self._device):
                pushed = self._pushed[replica].read_value()
                again = tf.equal(pushed, self._before[replica].read_value())
                if self.quorum.shared:
                    again = tf.equal(pushed, 0)
                    # The replica has lost the token that it had.
                    lost = tf.cast(pushed > 0, tf.int32)
                    step = self.step.read_value()
                    self._steps[0].put_many(tf.fill([lost], step))
                # The first gradient of the step, or fit, is begun again.
                self._local[replica].assign_sub(tf.cast(again, tf.int64))
                return tf.identity(pushed)

        (pushed,) = self.calls(("back", replica), body)
        self.send(ReplicaEvent.RETURNED, replica)
        return int(pushed)
