"""What the replicas of a model share: the global step, tokens, arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.replicas.events import Event
from keras_towers.replicas.quotas import most_of_one
from keras_towers.replicas.resources import (
    Queue,
    destroy,
    named,
    variable,
)

# A token that lets a replica go on without a gradient to compute.
_END = -1


class Group:
    """The replicas of a model.

    A token is the right to push one gradient. Its number is the global step for
    which it was handed out.

    Args:
        name: prefix of the names of the resources; every process that uses the
            same name and device shares them.
        device: the device that holds them.
        replicas: how many there are, T.
        aggregate: how many gradients an update averages, R.
        shared: whether any replica may take any token.
        run: calls a concrete function that takes no arguments, and may block.

    Raises:
        TowerError: too many gradients in an update.

    Attributes:
        step: the global step, a ``tf.Variable``: number of updates so far.
        replicas: number of replicas.
        aggregate: how many gradients an update averages.
        shared: whether any replica may take any token.
    """

    def __init__(
        self,
        name: str,
        device: str,
        replicas: int,
        aggregate: int,
        shared: bool,
        run: Callable[[Any], Any] = lambda function: function(),
    ):
        self.replicas = replicas
        self.aggregate = aggregate
        self.shared = shared
        self._most = most_of_one(aggregate, replicas, shared)
        self._name = name
        self._device = device
        self._run = run
        self._traced: dict[Any, Any] = {}
        self.step: tf.Variable = variable(f"{name}/step", device, (), tf.int64)
        number = 1 if shared else replicas
        self._tokens = [
            Queue(f"{name}/tokens_{index}", device, [tf.int64])
            for index in range(number)
        ]
        self._events = Queue(f"{name}/events", device, [tf.int64] * 3)
        # Of the replicas that were started again.
        self._welcomes: dict[int, Queue] = {}
        # Takes part in every average: who has pushed all of its gradients.
        self._complete = named(
            f"{name}/complete",
            device,
            lambda: tf.raw_ops.ResourceConditionalAccumulator(
                dtype=tf.float64,
                shape=[replicas],
                shared_name=f"{name}/complete",
                reduction_type="SUM",
            ),
        )

    def call(self, key: Any, body: Callable[[], Any]) -> Any:
        """Run operations, in a function that is traced once.

        By itself, an operation that fails on another process's device would
        break whatever this one runs there later.

        Args:
            key: tells the function from others.
            body: the operations.

        Returns:
            What ``run`` returns for it.
        """
        if key not in self._traced:

            def traced() -> Any:
                result = body()
                return None if isinstance(result, tf.Operation) else result

            with compat.single_device_mode():
                function = tf.function(traced, autograph=False)
                self._traced[key] = function.get_concrete_function()
        return self._run(self._traced[key])

    def forget(self, *keys: Any) -> None:
        """Drop functions that ``call`` has traced.

        Args:
            *keys: what they were traced for.
        """
        for key in keys:
            self._traced.pop(key, None)

    def initialise(self) -> None:
        """Begin at global step 0; one process does it, before all others."""
        self.call("initialise", lambda: self._assign(0))

    def begin_anew(self) -> tf.Tensor:
        """Increment the global step; drop what has arrived before."""
        with tf.device(self._device):
            step = self.step.assign_add(tf.ones((), tf.int64))
            left = tf.raw_ops.ResourceAccumulatorNumAccumulated(
                handle=self._complete
            )
            dropped = tf.cond(
                left > 0, lambda: self.take(left), lambda: self._nothing()
            )
            with tf.control_dependencies([dropped]):
                begun = tf.raw_ops.ResourceAccumulatorSetGlobalStep(
                    handle=self._complete, new_global_step=step
                )
            with tf.control_dependencies([begun]):
                return tf.identity(step)

    def _nothing(self) -> tf.Tensor:
        return tf.zeros([self.replicas], tf.int64)

    def _assign(self, value: int) -> None:
        with tf.device(self._device):
            self.step.assign(tf.constant(value, tf.int64), read_value=False)

    def global_step(self) -> int:
        """Return the number of updates so far."""
        return int(_only(self.call("step", self.step.read_value)))

    def clear(self) -> None:
        """Drop all tokens and events, while nobody uses them."""
        for index, queue in enumerate(self._queues):
            self.call(("clear", index), queue.clear)

    @property
    def _queues(self) -> list[Queue]:
        return [*self._tokens, self._events, *self._welcomes.values()]

    def clear_tokens(self, replica: int) -> None:
        """Drop those of a replica, which has died and comes back."""
        if not self.shared:
            queue = self._tokens[replica]
            self.call(("clear", replica), queue.clear)

    def get_token(self, replica: int) -> tf.Tensor:
        """Wait for a token.

        Args:
            replica: who waits, 0 to T - 1.

        Returns:
            Its number, negative if there is nothing left to do.
        """
        (token,) = self._tokens[0 if self.shared else replica].get()
        return token

    def local_step(self, token: tf.Tensor) -> tf.Tensor:
        """Return the step to which gradients computed from now on belong.

        Args:
            token: of the replica that computes them.
        """
        if self.shared:
            return token
        # It was handed out when its replica had nothing to compute yet.
        return tf.maximum(token, self.step.read_value())

    def number(self, replica: int, pushes: tf.Tensor) -> tf.Tensor:
        """Return what tells a gradient from all others of an average.

        Args:
            replica: who computed it.
            pushes: how many gradients it has pushed before.
        """
        return replica * self._most + tf.math.floormod(
            pushes, tf.constant(self._most, tf.int64)
        )

    def arrive(self, replica: int, step: tf.Tensor) -> tf.Operation | None:
        """Tell that a replica has pushed all of its gradients.

        Args:
            replica: the replica.
            step: its local step.
        """
        with tf.device(self._device):
            mine = tf.one_hot(replica, self.replicas, dtype=tf.float64)
            pushed = tf.raw_ops.ResourceAccumulatorApplyGradient(
                handle=self._complete, local_step=step, gradient=mine
            )
            with tf.control_dependencies([pushed]):
                return self._put(Event.ARRIVED, replica, step)

    def tell(self, event: Event, replica: int = 0) -> None:
        """Tell the coordinator something."""
        self.call(
            (event, replica),
            lambda: self._put(event, replica, tf.constant(0, tf.int64)),
        )

    def _put(self, event: Event, replica: int, step: tf.Tensor) -> Any:
        with tf.device(self._device):
            return self._events.put(tf.constant(int(event)), replica, step)

    def next_event(self) -> tuple[Event, int, int]:
        """Wait for an event.

        Returns:
            The event, the replica and its local step.
        """
        event, replica, step = map(int, self.call("next", self._events.get))
        return Event(event), replica, step

    def take(self, count: tf.Tensor) -> tf.Tensor:
        """Take those whose gradients are complete.

        Args:
            count: how many gradients there have to be, at least.

        Returns:
            Shape [T]: the number of gradients of each replica.
        """
        with tf.device(self._device):
            complete = tf.raw_ops.ResourceAccumulatorTakeGradient(
                handle=self._complete,
                num_required=tf.cast(count, tf.int32),
                dtype=tf.float64,
            )
            return tf.cast(tf.ensure_shape(complete, [self.replicas]), tf.int64)

    def advance(self, tokens: tf.Tensor) -> tf.Operation:
        """Increment the global step, then hand out tokens.

        Args:
            tokens: how many for each queue of tokens.
        """
        with tf.device(self._device):
            step = self.step.assign_add(tf.ones((), tf.int64))
            with tf.control_dependencies([step]):
                return self._put_tokens(tokens)

    def hand_out(self, tokens: Sequence[int]) -> None:
        """Hand out tokens for the global step.

        Args:
            tokens: how many for each queue of tokens.
        """
        numbers = tuple(tokens)
        self.call(
            ("tokens", numbers),
            lambda: self._put_tokens(tf.constant(numbers, tf.int32)),
        )

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

    def greet(self, replica: int, gradients: int) -> None:
        """Welcome a replica that was started again.

        Args:
            replica: the replica.
            gradients: how many it has pushed.
        """
        number = tf.constant(gradients, tf.int64)
        self.call(
            ("greet", replica, gradients),
            lambda: self._welcomes_of(replica).put(number),
        )

    def come_back(self, replica: int) -> int:
        """Ask for a welcome, as a replica that was started again.

        Returns:
            How many gradients it had pushed.
        """
        self.clear_tokens(replica)
        queue = self._welcomes_of(replica)
        # One that it has not taken.
        self.call(("clear welcomes", replica), queue.clear)
        self.tell(Event.RETURNED, replica)
        return int(_only(self.call(("welcome", replica), queue.get)))

    def _welcomes_of(self, replica: int) -> Queue:
        if replica not in self._welcomes:
            name = f"{self._name}/welcomes_{replica}"
            self._welcomes[replica] = Queue(name, self._device, [tf.int64])
        return self._welcomes[replica]

    def end(self, replica: int) -> None:
        """Let a replica that waits for a token go on without one."""
        queue = self._tokens[0 if self.shared else replica]
        self.call(
            ("end", replica), lambda: queue.put(tf.constant(_END, tf.int64))
        )

    def destroy(self) -> None:
        """Free the resources."""
        self._traced.clear()
        for queue in self._queues:
            queue.destroy()
        destroy(self._complete, self._device)
        destroy(self.step.handle, self._device)


def _only(results: Any) -> Any:
    return results[0] if isinstance(results, (list, tuple)) else results
