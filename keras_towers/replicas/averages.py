"""Averages the replicas' gradients, and updates weights by them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import tensorflow as tf

from keras_towers.fit.components import ApplyCall
from keras_towers.fit.weights.copies import read_later
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import ConcreteFunction, Variable
from keras_towers.replicas.accumulators import (
    Accumulator,
    GradientSpec,
    accumulator,
)
from keras_towers.replicas.named_resources import after_writes_of, trace
from keras_towers.replicas.replica_group import ReplicaGroup


@dataclasses.dataclass(eq=False)
class AveragedOptimizer:
    """One optimizer, and an accumulator or None for each gradient."""

    call: ApplyCall
    gradients: list[str]
    accumulators: list[Accumulator | None]

    def take_averages(self, count: tf.Tensor) -> ApplyCall:
        """Wait for gradients; return the update with their averages."""
        averages = [
            None if each is None else each.take_average(count)
            for each in self.accumulators
        ]
        return dataclasses.replace(self.call, grads=averages)


class Averages:
    """The optimizers of a model, each with its accumulators."""

    def __init__(
        self,
        name: str,
        group: ReplicaGroup,
        place: Callable[[Variable], str],
        update: Callable[[ApplyCall], None],
        updated: Callable[[], None] = lambda: None,
    ):
        """Create the accumulators; ``updated`` is traced after all updates."""
        self._name = name
        self._group = group
        self._place = place
        self._update = update
        self._updated = updated
        self._parts: list[AveragedOptimizer] = []
        # Filled while a step is traced.
        self._traced: list[AveragedOptimizer] = []
        self._pushes: list[tf.Operation] = []
        # For each update, how many operations came before it.
        self._begun: list[tuple[int, ApplyCall]] = []
        self._function: ConcreteFunction | None = None

    def push(self, replica: int, call: ApplyCall) -> None:
        """Push the gradients of one replica's step."""
        same = (p for p in self._parts if p.call.optimizer is call.optimizer)
        part = next(same, None) or self._add(call)
        _check_equal(part.gradients, call.describe_gradients())
        self._traced.append(part)
        begun = len(compat.get_default_graph().get_operations())
        self._begun.append((begun, call))
        step, number = self._group.number_gradient(replica)
        self._pushes += [
            accumulated.push(grad, step, number)
            for accumulated, grad in zip(
                part.accumulators, call.grads, strict=True
            )
            if accumulated is not None and grad is not None
        ]

    def _add(self, call: ApplyCall) -> AveragedOptimizer:
        """Create the accumulators of one more optimizer."""
        name = f"{self._name}/{len(self._parts)}"
        gradients = zip(call.names, call.variables, call.grads, strict=True)
        accumulators = [
            None
            if grad is None
            else accumulator(
                f"{name}/{index}",
                GradientSpec(
                    name=path,
                    shape=tuple(variable.shape),
                    dtype=grad.dtype,
                    sparse=isinstance(grad, tf.IndexedSlices),
                    device=self._place(variable),
                ),
            )
            for index, (path, variable, grad) in enumerate(gradients)
        ]
        # Tensors would keep the graph of the trace.
        without = dataclasses.replace(call, grads=[])
        part = AveragedOptimizer(
            without, call.describe_gradients(), accumulators
        )
        self._parts.append(part)
        self._function = None
        return part

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace a replica's step in this block, up to ``end_step``."""
        try:
            yield
        finally:
            # Tensors would keep the graph, and thus the model.
            self._traced.clear()
            self._pushes.clear()
            self._begun.clear()

    def end_step(self, replica: int) -> None:
        """Count the arrival of a replica, in the trace of its step.

        It is in the same function, so that a replica cannot die in between.
        """
        if not self._traced:
            refuse_without_update("whose gradients the replicas average")
        missing = [p for p in self._parts if p not in self._traced]
        twice = len(self._traced) > len({id(p) for p in self._traced})
        graph = compat.get_default_graph()
        nested = [push for push in self._pushes if push.graph is not graph]
        if missing or twice or nested:
            how = "twice" if twice else "in a condition or a loop"
            how = "not at all" if missing else how
            raise TowerError(
                f"a step calls one of the model's optimizers {how}: call each "
                "optimizer once in every step, since replicas average one "
                "gradient of each."
            )
        self._refuse_later_reads(graph)
        with tf.control_dependencies(self._pushes):
            self._group.arrive(replica)

    def _refuse_later_reads(self, graph: tf.Graph) -> None:
        """Refuse a step that reads a weight after an update of this weight.

        It would read the old value: averages are applied after the step.
        """
        read: dict[str, None] = {}
        for begun, call in self._begun:
            read |= dict.fromkeys(call.read_later)
            read |= dict.fromkeys(read_later(call, graph, begun))
        if read:
            raise TowerError(
                "the step calls an optimizer and then reads "
                f"{', '.join(read)}, but replicas update weights only after "
                "the step: compute all gradients before the first call of an "
                "optimizer, or use a strategy that updates within the step, "
                "such as TowerStrategy or MultiWorkerTowerStrategy."
            )

    def update_function(self) -> ConcreteFunction:
        """Return the function that makes an update; call in the main thread.

        It takes the number of gradients to wait for, increments the global
        step, and returns how many gradients of each replica it has averaged.
        """
        if self._function is not None:
            return self._function
        early = self._group.early

        def apply(count: tf.Tensor) -> tf.Tensor:
            complete = self._group.take_arrivals(count)
            # A replica that has arrived has pushed to every accumulator.
            with tf.control_dependencies([] if early else [complete]):
                updates = [part.take_averages(count) for part in self._parts]
            # Values that a callback has written before the step, such as the
            # learning rate, are not read before the first gradients arrive:
            # the gradients of the last layers.
            present = [g for g in updates[0].grads if g is not None]
            first = tf.nest.flatten(present, expand_composites=True)
            with tf.control_dependencies(first[-1:] if early else []):
                updated = after_writes_of(lambda: [*map(self._update, updates)])
            self._updated()
            with tf.control_dependencies([updated, complete]):
                advanced = self._group.advance()
            with tf.control_dependencies([advanced]):
                return tf.identity(complete)

        self._function = trace(apply, tf.TensorSpec((), tf.int32))
        return self._function

    def begin_fit(self) -> None:
        """Begin a ``fit`` at a new step; drop gradients of an earlier ``fit``.

        No replica may push gradients at the same time.
        """
        self._group.calls(
            ("begin", self._name, len(self._parts)),
            lambda: self._advance_to(self._group.start_over(), drops=True),
        )

    def join_fit(self) -> None:
        """Begin at the global step of a group that may be training already."""
        self._group.calls(
            ("join", self._name),
            lambda: self._advance_to(
                self._group.step.read_value(), drops=False
            ),
        )

    def _advance_to(self, step: tf.Tensor, drops: bool) -> tf.Tensor:
        gone = [
            accumulated.advance_to(step, drops)
            for part in self._parts
            for accumulated in part.accumulators
            if accumulated is not None
        ]
        with tf.control_dependencies(gone):
            return tf.identity(step)


def refuse_without_update(why: str) -> NoReturn:
    """Refuse a step that updates nothing, or only in a condition or a loop."""
    raise TowerError(
        "the step updates nothing: it must call apply (or apply_gradients) "
        f"of a Keras optimizer, {why}, and not in a condition or a loop."
    )


def refuse_new_step() -> NoReturn:
    """Refuse another step of replicas that have begun to train."""
    raise TowerError(
        "replicas whose gradients are averaged have one step for a whole fit: "
        "call make_train_function(force=True) before fit or after it, not in a "
        "callback."
    )


def _check_equal(known: Sequence[str], new: Sequence[str]) -> None:
    odd = sorted(set(known) ^ set(new))
    if odd:
        raise TowerError(
            "the replicas do not have gradients for the same variables, or "
            f"not of the same kind: they differ in {', '.join(odd)}. Every "
            "replica must compute the same loss."
        )
