"""Gradients that replicas average in accumulators, and their application."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.update import gradients
from keras_towers.reduction import Gradient
from keras_towers.replicas import Accumulators, Group
from keras_towers.replicas.accumulators import GradientSpec


@dataclasses.dataclass(eq=False)
class Part:
    """The gradients of one optimizer.

    Attributes:
        optimizer: the optimizer.
        original: its own ``apply``, taking gradients and variables.
        variables: the N variables that it was called with.
        present: which of these have a gradient.
        specs: of the gradients that there are.
        accumulators: of the same.
    """

    optimizer: keras.optimizers.Optimizer
    original: Callable[[list[Any], list[Any]], Any]
    variables: list[Any]
    present: list[bool]
    specs: list[GradientSpec]
    accumulators: Accumulators

    def with_gaps(self, averages: Sequence[Gradient]) -> list[Any]:
        """Return N gradients, with None for those that are missing."""
        given = iter(averages)
        return [next(given) if there else None for there in self.present]


class Averages:
    """The optimizers of a model, each with its accumulators.

    Args:
        name: prefix of the names of the accumulators.
        group: the replicas.
        place: returns the device where the gradient of a variable is averaged.
        update: applies a part's averages, given with gaps.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        place: Callable[[Any], str],
        update: Callable[[Part, list[Any]], None],
    ):
        self._name = name
        self._group = group
        self._place = place
        self._update = update
        self._parts: list[Part] = []
        self._traced: list[Part] = []

    @property
    def parts(self) -> Sequence[Part]:
        """One for each optimizer that a step has called."""
        return self._parts

    def push(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        grads: Sequence[Any],
        step: tf.Tensor,
        number: tf.Tensor,
    ) -> list[tf.Operation]:
        """Push the gradients that a step of one replica applies.

        Args:
            optimizer: the optimizer that the step called.
            original: its own ``apply``.
            variables: the N variables.
            grads: their gradients; None for a missing one.
            step: the replica's local step.
            number: tells these gradients from all others of an average.

        Returns:
            What has to run before all of them have been pushed.

        Raises:
            TowerError: a gradient cannot be averaged, or another replica has
                gradients for other variables.
        """
        there = [
            (variable, grad)
            for variable, grad in zip(variables, grads, strict=True)
            if grad is not None
        ]
        specs = [
            GradientSpec(
                name=gradients.name_of(variable),
                shape=tuple(variable.shape),
                dtype=grad.dtype,
                sparse=isinstance(grad, tf.IndexedSlices),
                device=self._place(variable),
            )
            for variable, grad in there
        ]
        part = self._part_of(optimizer, specs)
        if part is None:
            name = f"{self._name}/{len(self._parts)}"
            part = Part(
                optimizer,
                original,
                list(variables),
                [grad is not None for grad in grads],
                specs,
                Accumulators(name, specs),
            )
            self._parts.append(part)
        self._traced.append(part)
        grads = [grad for _, grad in there]
        return part.accumulators.push(grads, step, number)

    def _part_of(
        self, optimizer: Any, specs: Sequence[GradientSpec]
    ) -> Part | None:
        for part in self._parts:
            if part.optimizer is optimizer:
                _check_alike(part.specs, specs)
                return part
        return None

    def begin_trace(self) -> None:
        """A step of one replica is about to be traced."""
        self._traced.clear()

    def end_trace(self) -> None:
        """It has been traced.

        Raises:
            TowerError: it does not update what an average is taken of.
        """
        if not self._traced:
            raise TowerError(
                "the step updates nothing: it has to call apply (or "
                "apply_gradients) of a Keras optimizer, whose gradients the "
                "replicas average."
            )
        missing = [p for p in self._parts if p not in self._traced]
        twice = len(self._traced) > len({id(p) for p in self._traced})
        if missing or twice:
            how = "not at all" if missing else "twice"
            raise TowerError(
                f"a step calls one of the model's optimizers {how}: replicas "
                "average one gradient of each optimizer in every step."
            )

    def function(
        self,
    ) -> Callable[[int, Sequence[int]], Sequence[int]]:
        """Trace the application of averages of all parts.

        Returns:
            A function that takes how many gradients have arrived, and how many
            tokens to hand out to each queue of the group; applies the averages,
            increments the global step and hands out the tokens. It returns how
            many gradients of each replica have been averaged.
        """

        def apply(count: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
            complete = self._group.take(count)
            # A gradient that is complete has arrived in every accumulator.
            with tf.control_dependencies([complete]):
                averages = [
                    part.with_gaps(part.accumulators.take(count))
                    for part in self._parts
                ]
                updated = done(self._update_all, averages)
            with tf.control_dependencies([updated]):
                advanced = self._group.advance(tokens)
            with tf.control_dependencies([advanced]):
                return tf.identity(complete)

        queues = 1 if self._group.shared else self._group.replicas
        with compat.single_device_mode():
            traced = tf.function(apply, autograph=False).get_concrete_function(
                tf.TensorSpec((), tf.int32), tf.TensorSpec([queues], tf.int32)
            )

        def applied(count: int, tokens: Sequence[int]) -> Sequence[int]:
            averaged = traced(
                tf.constant(count, tf.int32), tf.constant(tokens, tf.int32)
            )
            return [int(number) for number in averaged.numpy()]

        return applied

    def begin(self) -> None:
        """Begin with a new step, without what an earlier fit has left behind.

        Nobody may push meanwhile. A fit that was interrupted leaves gradients
        that have not been averaged.
        """
        self._group.call("anew", self._anew)

    def _anew(self) -> tf.Tensor:
        step = self._group.begin_anew()
        begun = [part.accumulators.begin_anew(step) for part in self._parts]
        with tf.control_dependencies(itertools.chain(*begun)):
            return tf.identity(step)

    def join(self) -> None:
        """Begin at the global step of the group, which may have come far."""
        self._group.call(("join", self._name), self._join)

    def _join(self) -> tf.Tensor:
        step = self._group.step.read_value()
        joined = [part.accumulators.go_to(step) for part in self._parts]
        with tf.control_dependencies(itertools.chain(*joined)):
            return tf.identity(step)

    def _update_all(self, averages: Sequence[list[Any]]) -> None:
        for part, grads in zip(self._parts, averages, strict=True):
            self._update(part, grads)

    def destroy(self) -> None:
        """Free the accumulators."""
        for part in self._parts:
            part.accumulators.destroy()
        self._parts.clear()


def done(function: Callable[..., Any], *args: Any) -> tf.Tensor:
    """Return a tensor that is ready once all writes of a call are done."""
    graph = compat.get_default_graph()
    begun = len(graph.get_operations())
    function(*args)
    made = graph.get_operations()[begun:]
    with tf.control_dependencies([op for op in made if op.op_def.is_stateful]):
        return tf.constant(True)


def _check_alike(
    there: Sequence[GradientSpec], here: Sequence[GradientSpec]
) -> None:
    if list(there) == list(here):
        return
    odd = sorted(
        {
            spec.name
            for a, b in itertools.zip_longest(there, here)
            if a != b
            for spec in (a, b)
            if spec is not None
        }
    )
    raise TowerError(
        "the replicas do not have gradients for the same variables, or not of "
        f"the same kind: they differ in {', '.join(odd)}. Every replica has to "
        "compute the same loss."
    )
