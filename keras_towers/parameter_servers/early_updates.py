"""Updates that begin before all of their gradients have arrived.

Requires that every replica computes one gradient of each update, so that none
is dropped. A weight is updated as soon as all of its gradients have arrived,
and read as soon as it is updated, while gradients of other weights are still
being received: this uses both directions of a link.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.parameter_servers.worker_updates import AveragedUpdates
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.named_resources import Queue, Queues
from keras_towers.replicas.replica_group import ReplicaEvent, ReplicaGroup


class EarlyGroup(ReplicaGroup):
    """Replicas that get a token for each update, and one for each part of it.

    A token is the step whose weights are ready. After a restart, a replica
    skips the old tokens that it had not taken.
    """

    early = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The global step at which the fit began.
        self._first_step = self._number("first_step")
        self._parts = Queues(f"{self._name}/parts", self._device)

    def start_over(self) -> tf.Tensor:
        step = super().start_over()
        with tf.device(self._device):
            self._first_step.assign(step, read_value=False)
            return step

    def _next_token(self, replica: int) -> tf.Tensor:
        return self._wait_for_step(replica, self._tokens[replica])

    def wait_for_part(self, replica: int, part: int) -> tf.Tensor:
        """Wait for a part of the next weights."""
        return self._wait_for_step(replica, self._parts[f"{replica}/{part}"])

    def _wait_for_step(self, replica: int, queue: Queue) -> tf.Tensor:
        """Wait for the step after the one of a replica's gradients."""
        with tf.device(self._device):
            due = self._local[replica].read_value() + 1
            return queue.wait_for(due, self.step.read_value())

    def publish_part(self, part: int) -> None:
        """Publish that a part of the next step's weights is ready."""
        with tf.device(self._device):
            step = self.step.read_value() + 1
            for replica in range(self.quorum.replicas):
                self._parts[f"{replica}/{part}"].put(step)

    def advance(self, tokens: tf.Tensor) -> tf.Operation:
        with tf.device(self._device):
            # Sent before the tokens: a replica with a token may leave at once.
            counted = self._put(ReplicaEvent.UPDATED, 0, self.step.read_value())
        with tf.control_dependencies([counted]):
            return super().advance(tokens)

    def send_end(self, replica: int) -> None:
        """Send a replica the last token; the weights stay as they are."""
        named = self._parts.items()
        own = [part for key, part in named if key.startswith(f"{replica}/")]

        def publish_all() -> None:
            with tf.device(self._device):
                step = self.step.read_value() + 1
            for part in own:
                part.put(step)

        self.calls(("parts", replica, len(own)), publish_all)
        super().send_end(replica)

    def request_tokens(self, replica: int) -> None:
        """Go on after the last gradient that the replica has pushed."""
        self.calls(("enter", replica), lambda: self._go_on(replica))

    def _go_on(self, replica: int) -> None:
        with tf.device(self._device):
            due = self._first_step.read_value()
            due += self.read_pushed(replica)
            self._local[replica].assign(due - 1, read_value=False)


class EarlyCoordinator(Coordinator):
    """Begins each update before the gradients, one per replica, have arrived.

    Every update needs a gradient of each replica that has not left. A replica
    leaves before it pushes a gradient: the update that waits for it has changed
    no weight, and can be canceled. Here ``apply`` returns a running update.
    """

    _running: RunningFunction | None = None

    def check_failed(self) -> None:
        """Raise the error of the running update, if it has failed."""
        if self._running is not None and self._running.has_failed:
            self._running.wait()

    def _begin(self) -> None:
        self._begin_update()

    def _end(self) -> None:
        self._cancel_update()
        super()._end()

    def _handle(self, event: ReplicaEvent, number: int, step: int) -> None:
        if event is ReplicaEvent.UPDATED:
            self._count_update()
            self._begin_update()
        elif event is ReplicaEvent.LEFT:
            self._replicas[number].has_left = True
            self._cancel_update()
            self._begin_update()
        elif event is ReplicaEvent.STOPPED:
            # The others may have begun a step that one device does not make.
            self._cancel_update()
            for other, replica in enumerate(self._replicas):
                if not replica.has_left and other != number:
                    self._group.send_end(other)
                replica.has_left = True
        elif event in (ReplicaEvent.FLUSH, ReplicaEvent.SYNC):
            self._waited_for.popleft().set()

    def _begin_update(self) -> None:
        """Begin the next update, unless all replicas have left."""
        here = sum(not replica.has_left for replica in self._replicas)
        if here:
            self._running = self._apply(here, [1] * len(self._replicas))

    def _count_update(self) -> None:
        running, self._running = self._running, None
        assert running is not None
        (averaged,) = running.wait()
        self._step += 1
        for replica, used in zip(self._replicas, averaged, strict=True):
            replica.used += int(used)

    def _cancel_update(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None


class EarlyUpdates(AveragedUpdates):
    """Applies the average of one gradient per worker, part by part."""

    reads_parts = True
    needs_all = True
    _coordinator_type = EarlyCoordinator
    _group_type = EarlyGroup
    _run_update = RunningFunction
    _group: EarlyGroup

    def _publish_parts(self) -> None:
        variables = self._session.variables
        for index, part in enumerate(variables.parts):
            with tf.control_dependencies(variables.read(part)):
                self._group.publish_part(index)

    def wait_for_part(self, part: int) -> tf.Tensor:
        return self._group.wait_for_part(self._rank, part)

    def leave(self, stops: bool = False) -> None:
        event = ReplicaEvent.STOPPED if stops else ReplicaEvent.LEFT
        self._group.send(event, self._rank)
