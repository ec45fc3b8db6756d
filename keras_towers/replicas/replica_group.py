"""The shared state of a model's replicas: step, tokens, arrivals."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from typing import Any, Self

import tensorflow as tf

from keras_towers.replicas.accumulators import Accumulator, GradientSpec
from keras_towers.replicas.named_resources import (
    Queue,
    TracedCalls,
    run_flat,
    variable,
)
from keras_towers.replicas.quorum import Quorum

END: int = 1 << 62
"""The last token, for which no gradient is computed."""


class ReplicaEvent(enum.IntEnum):
    """An event for the coordinator."""

    ARRIVED = 0
    """A replica has pushed its gradients."""
    STARTED = 1
    """A replica computes its first gradient, and wants tokens for more."""
    LEFT = 2
    """A replica has no more data."""
    FLUSH = 3
    """The gradients that have arrived are to be applied, be they too few."""
    END = 4
    """The coordinator is to end."""
    SYNC = 5
    """A thread waits until all earlier events have been handled."""
    ENTERED = 6
    """A replica waits for its first token, maybe after a restart."""
    LOST = 7
    """A replica has died or stopped."""
    UPDATED = 8
    """An update that began before its gradients arrived has been made."""
    STOPPED = 9
    """A replica has stopped the training: no update follows."""


class ReplicaGroup:
    """The shared state of a model's replicas, on one device.

    A token is the right to push one gradient; its value is the global step at
    which it was handed out. ``start_gradient`` to ``advance`` add operations to
    a tf.function; the other methods run immediately.

    Attributes:
        early: whether updates begin before their gradients have arrived.
    """

    early = False

    def __init__(
        self,
        name: str,
        device: str,
        quorum: Quorum,
        run: Callable[[Any], list[Any]] = run_flat,
    ):
        self.quorum = quorum
        self.calls: TracedCalls = TracedCalls(run)
        self._name = name
        self._device = device
        self.step: Any = self._number("step")
        self._tokens = [
            Queue(f"{name}/tokens_{index}", device, [tf.int64])
            for index in range(quorum.queues)
        ]
        self._events = Queue(f"{name}/events", device, [tf.int64] * 3)
        # Part of every average: the replicas that have pushed all gradients.
        arrivals = GradientSpec(
            "arrivals", (quorum.replicas,), tf.float64, False, device
        )
        self._arrivals = Accumulator(f"{name}/arrivals", arrivals, "SUM")
        # For each replica: the step of its gradients, how many it has pushed.
        replicas = range(quorum.replicas)
        self._local = [self._number(f"local_{index}") for index in replicas]
        self._pushed = [self._number(f"pushed_{index}") for index in replicas]

    def _number(self, name: str) -> Any:
        return variable(f"{self._name}/{name}", self._device, (), tf.int64)

    def run_by(self, run: Callable[[Any], list[Any]]) -> Self:
        """Return the same group, which runs its operations differently."""
        other = copy.copy(self)
        other.calls = TracedCalls(run)
        return other

    def start_gradient(
        self, replica: int, token: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Begin to compute a gradient with the current weights."""
        with tf.device(self._device):
            # A token of one replica may have been handed out long ago.
            shared = self.quorum.shared and token is not None
            step = token if shared else self.step.read_value()
            return tf.identity(self._local[replica].assign(step))

    def wait_for_token(self, replica: int) -> tf.Tensor:
        """Wait for a token, ``END`` at the end, and ``start_gradient``."""
        token = self._next_token(replica)
        with (
            tf.control_dependencies([token]),
            tf.control_dependencies([self.start_gradient(replica, token)]),
        ):
            return tf.identity(token)

    def _next_token(self, replica: int) -> tf.Tensor:
        return self._queue(replica).get()[0]

    def _queue(self, replica: int) -> Queue:
        return self._tokens[0 if self.quorum.shared else replica]

    def labels(self, replica: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the step and the number of a gradient, for accumulators."""
        most = self.quorum.most_of_one
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
            counted = [
                self._arrivals.push(one, step),
                self._pushed[replica].assign_add(
                    tf.ones((), tf.int64), read_value=False
                ),
            ]
            if not self.early:
                with tf.control_dependencies(counted):
                    self._put(ReplicaEvent.ARRIVED, replica, step)

    def start_over(self) -> tf.Tensor:
        """Start over, without any earlier tokens, events or arrivals."""
        # No other process may use the group at the same time.
        for queue in [*self._tokens, self._events]:
            queue.clear()
        with tf.device(self._device):
            for pushed in self._pushed:
                pushed.assign(tf.zeros((), tf.int64), read_value=False)
            step = self.step.assign_add(tf.ones((), tf.int64))
            with tf.control_dependencies(
                [self._arrivals.advance_to(step, True)]
            ):
                return tf.identity(step)

    def take_arrivals(self, count: tf.Tensor) -> tf.Tensor:
        """Wait for arrivals, and take all: shape [T], by replica."""
        with tf.device(self._device):
            arrivals: Any = self._arrivals.take_average(count)
            return tf.cast(arrivals, tf.int64)

    def advance(self, tokens: tf.Tensor) -> tf.Operation:
        """Increment the global step, and hand out tokens to each queue."""
        with tf.device(self._device):
            step = self.step.assign_add(tf.ones((), tf.int64))
            with tf.control_dependencies([step]):
                return self._put_tokens(tokens)

    def _put_tokens(self, tokens: tf.Tensor) -> tf.Operation:
        with tf.device(self._device):
            step = self.step.read_value()
            numbers = tf.unstack(tokens, num=len(self._tokens))
            return tf.group(
                *(
                    queue.put_many(tf.fill([number], step))
                    for queue, number in zip(self._tokens, numbers, strict=True)
                )
            )

    def _put(self, event: ReplicaEvent, replica: int, step: tf.Tensor) -> Any:
        with tf.device(self._device):
            return self._events.put(tf.constant(int(event)), replica, step)

    def send(self, event: ReplicaEvent, replica: int = 0) -> None:
        """Send an event to the coordinator."""
        self.calls(
            (event, replica),
            lambda: self._put(event, replica, tf.constant(0, tf.int64)),
        )

    def next_event(self) -> tuple[ReplicaEvent, int, int]:
        """Wait for an event; return it, the replica and its local step."""
        event, replica, step = map(int, self.calls("next", self._events.get))
        return ReplicaEvent(event), replica, step

    def hand_out(self, tokens: Sequence[int]) -> None:
        """Hand out tokens to each queue, for the global step."""
        numbers = tuple(tokens)
        self.calls(
            ("tokens", numbers),
            lambda: self._put_tokens(tf.constant(numbers, tf.int32)),
        )

    def send_end(self, replica: int) -> None:
        """Send a replica the last token."""
        self.calls(
            ("end", replica),
            lambda: self._queue(replica).put(tf.constant(END, tf.int64)),
        )

    def send_end_to_all(self) -> None:
        """Send all replicas the last token."""
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

    def request_tokens(self, replica: int) -> None:
        """Request tokens, also after a restart, which loses old tokens."""
        if not self.quorum.shared:
            queue = self._tokens[replica]
            self.calls(("clear", replica), queue.clear)
        self.send(ReplicaEvent.ENTERED, replica)

    def pushed(self, replica: int) -> int:
        """Return how many gradients a replica has pushed in this ``fit``."""
        (count,) = self.calls(
            ("pushed", replica), lambda: self.read_pushed(replica)
        )
        return int(count)
