"""Updates that begin before their gradients have arrived.

They are possible where every replica computes one gradient of each update, and
none is dropped. Each weight is updated as soon as all of its gradients are
there, and read as soon as it is updated, while others are still on their way:
both directions of a link are in use. No tokens are needed: a replica knows by
notes which weights are ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers.parameter_servers.averaged_updates import AveragedUpdates
from keras_towers.parameter_servers.barrier import LEFT, Notes
from keras_towers.parameter_servers.remote import Running
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.group import END, Event, Group
from keras_towers.replicas.quorum import Quorum
from keras_towers.replicas.resources import flat


class EarlyGroup(Group):
    """Replicas that are told by notes when their weights are ready.

    Attributes:
        notes: from the coordinator, with the step whose weights are ready.
    """

    early = True

    def __init__(
        self,
        name: str,
        device: str,
        quorum: Quorum,
        rank: int,
        run: Callable[[Any], list[Any]] = flat,
    ):
        super().__init__(name, device, quorum, run)
        self.notes: Notes = Notes(
            f"{name}/notes", device, rank, quorum.replicas, publishers=1
        )
        # Of the fit.
        self._first_step = self._number("first_step")

    def begin(self) -> tf.Tensor:
        self.notes.begin()
        with tf.device(self._device):
            step = super().begin()
            self._first_step.assign(step, read_value=False)
            return step

    def start_first(self, replica: int) -> tf.Tensor:
        """Begin to compute the first gradient of a ``fit``."""
        return self.notes.reset(self.start(replica))

    def wait(self, replica: int) -> tf.Tensor:
        """Wait for the next weights, and ``start``; negative at the end."""
        known = self.notes.wait(self.due(replica))
        with tf.control_dependencies([known]):
            step = self.start(replica)
        with tf.device(self._device):
            has_ended = tf.reduce_max(known) >= LEFT
            return tf.where(has_ended, tf.constant(END, tf.int64), step)

    def due(self, replica: int) -> tf.Tensor:
        """The step after the one that a replica's gradients belong to."""
        with tf.device(self._device):
            return self._local[replica].read_value() + 1

    def wait_for_part(self, replica: int, part: int) -> tf.Tensor:
        """Wait for a part of the next weights."""
        return self.notes.wait(self.due(replica), part)

    def publish_part(self, part: int) -> None:
        """Publish that a part of the next step's weights is ready."""
        with tf.device(self._device):
            self.notes.publish(0, self.step.read_value() + 1, part)

    def advance(self, tokens: tf.Tensor) -> tf.Operation:
        with tf.device(self._device):
            step = self.step.assign_add(tf.ones((), tf.int64))
            with tf.control_dependencies([step]):
                # Before the note: whoever gets it may leave at once.
                counted = self._put(Event.UPDATED, 0, step)
            with tf.control_dependencies([counted]):
                return tf.group(*self.notes.publish(0, step))

    def enter(self, replica: int) -> None:
        """Go on behind the last gradient that the replica has pushed."""
        self.calls(("enter", replica), lambda: self._enter(replica))

    def _enter(self, replica: int) -> None:
        with tf.device(self._device):
            due = self._first_step.read_value()
            due += self._pushed[replica].read_value()
            self._local[replica].assign(due - 1, read_value=False)
            # Notes that it had received before it died may be lost.
            self.notes.reset(self.step.read_value())

    def end_all(self) -> None:
        self.calls("release", self.notes.release)


class EarlyCoordinator(Coordinator):
    """Begins each update before the gradients, one per replica, have arrived.

    Every update needs a gradient of each replica that has not left. A replica
    leaves between its gradients: an update that waits for it has begun with no
    weight, and can be broken off. Here ``apply`` returns an update that runs.
    """

    _running: Running | None = None

    def check(self) -> None:
        """Raise the error of the running update, if it has failed."""
        if self._running is not None and self._running.has_failed:
            self._running.wait()

    def _begin(self) -> None:
        self._renew()

    def _end(self) -> None:
        self._break_off()
        super()._end()

    def _handle(self, event: Event, number: int, step: int) -> None:
        if event is Event.UPDATED:
            self._count_update()
            self._renew()
        elif event is Event.LEFT:
            self._replicas[number].has_left = True
            self._break_off()
            self._renew()
        elif event in (Event.FLUSH, Event.ASKED):
            self._waited_for.popleft().set()

    def _renew(self) -> None:
        """Begin the next update."""
        here = sum(not replica.has_left for replica in self._replicas)
        if here:
            self._running = self._apply(here, [0] * len(self._replicas))

    def _count_update(self) -> None:
        running, self._running = self._running, None
        assert running is not None
        (averaged,) = running.wait()
        self._step += 1
        for replica, used in zip(self._replicas, averaged, strict=True):
            replica.used += int(used)

    def _break_off(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None


class EarlyUpdates(AveragedUpdates):
    """Averages of one gradient of each worker, applied part by part."""

    reads_parts = True
    _coordinator_type = EarlyCoordinator
    _run_update = Running
    _group: EarlyGroup

    def _make_group(self, name: str) -> EarlyGroup:
        session = self._session
        return EarlyGroup(
            name, session.server, self.quorum, self._rank, session.run_in_step
        )

    def _publish_parts(self) -> None:
        variables = self._session.variables
        for index, part in enumerate(variables.parts):
            with tf.control_dependencies(variables.read(part)):
                self._group.publish_part(index)

    def wait_for_part(self, part: int) -> tf.Tensor:
        return self._group.wait_for_part(self._rank, part)
