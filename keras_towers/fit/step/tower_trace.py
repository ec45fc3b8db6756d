"""The trace of a step on one tower, as a function that all towers call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.origins import Origins
from keras_towers.fit.contract import TakesGradients, TowerConfig
from keras_towers.fit.step import differences
from keras_towers.fit.step.bodies import Body
from keras_towers.fit.step.differences import Different
from keras_towers.fit.update import gradients as gradients_lib
from keras_towers.fit.update import optimizers


class _Asked(NamedTuple):
    """A call of an optimizer in a trace.

    Attributes:
        optimizer: the optimizer.
        original: its own ``apply``.
        variables: those it was called with.
        gradients: N gradients; None for a missing one.
        place: number of operations before it.
    """

    optimizer: keras.optimizers.Optimizer
    original: Callable[[list[Any], list[Any]], Any]
    variables: Any
    gradients: list[Any]
    place: int


class _Recorder:
    """Records the gradients of a trace instead of applying them."""

    def __init__(self, update: TakesGradients | None):
        self._update = update
        self.asked: list[_Asked] = []

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        if self._update is not None:
            self._update.place_optimizer(optimizer)

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None,
    ) -> None:
        graph = compat.get_default_graph()
        tower = tower_lib.current()
        if tower is not None and graph is not tower.graph:
            tower.differs("applies gradients in control flow or a function")
        variables = trainable_variables
        if variables is not None:
            # It may be an iterator, and is asked for by every tower.
            variables = list(variables)
        place = len(graph.get_operations())
        asked = _Asked(optimizer, original, variables, list(grads), place)
        self.asked.append(asked)


class TowerTrace:
    """The trace of a step on the first tower.

    Args:
        config: the towers.
        step: takes a tower's part of the batch.
        tower: the first tower.
        data: its part.
        note: called in the trace with what the step returns and with the
            results of metrics; or None.

    Attributes:
        graph: the trace.

    Raises:
        Different: it cannot be that of other towers.
    """

    def __init__(
        self,
        config: TowerConfig,
        step: Callable[[Any], Any],
        tower: tower_lib.Tower,
        data: Any,
        note: Callable[[Any, Any], None] | None,
    ):
        self._step = step
        self._data = data
        self._note = note
        self._why = ""
        self._output: Any = None
        self._recorder = _Recorder(tower.update)
        self._tower = dataclasses.replace(
            tower,
            update=self._recorder,
            results=[],
            shared=self._refuse,
        )
        self.graph = self._graph(self._inputs(data, tower))
        asked = self._recorder.asked
        if len(asked) > 1:
            raise Different("calls optimizers several times")
        self._asked = asked[0] if asked else None
        differences.check_operations(self.graph)
        self._captures = differences.captures_for_towers(self.graph, config)
        if self._asked is not None:
            variables = gradients_lib.variables_of(
                self._asked.optimizer, self._asked.variables
            )
            differences.check_update(self._asked.optimizer, variables)
            later = self.graph.get_operations()[self._asked.place :]
            differences.check_after_update(self.graph, later)
        self._body = Body(self.graph)

    def _graph(self, inputs: Sequence[tf.Tensor]) -> Any:
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
        trace = compat.func_graph_from_py_func
        try:
            graph = trace("tower_step", self._run, specs, {})
        except Exception as error:
            # Layers raise another exception instead of it.
            if self._why:
                raise Different(self._why) from error
            raise
        if self._why:
            # The step has caught it.
            raise Different(self._why)
        return graph

    def _refuse(self, why: str) -> NoReturn:
        self._why = self._why or why
        raise Different(why)

    def _inputs(self, data: Any, tower: tower_lib.Tower) -> list[tf.Tensor]:
        """What differs between towers besides their variables."""
        values = [*differences.leaves_of(data), tower.share, tower.live]
        return [value for value in values if isinstance(value, tf.Tensor)]

    def _run(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        """The step as a function of tensors, in its own graph."""
        given = iter(inputs)
        data = _filled(self._data, given)
        tower = self._tower
        tower.share = _filled(tower.share, given)
        tower.live = _filled(tower.live, given)
        if tower.origins is not None:
            tower.origins = Origins(data)
        with (
            tf.variable_creator_scope(self._creates),
            tower_lib.activate(tower),
        ):
            self._output = self._step(data)
            if self._note is not None:
                self._note(self._output, tower.results)
        return _tensors(self._results())

    def _creates(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("creates variables")

    def _results(self) -> Any:
        return self._output, [a.gradients for a in self._recorder.asked]

    def __call__(self, data: Any, tower: tower_lib.Tower) -> Any:
        """Run the step on a tower; return what it returns there."""
        inputs = self._inputs(data, tower)
        inputs += self._captures[tower.local_index]
        outputs = iter(self._body(inputs))
        output, gradients = _filled(self._results(), outputs)
        if self._asked is not None:
            tower.loss_is_weighted = self._tower.loss_is_weighted
            optimizers.apply(
                self._asked.optimizer,
                self._asked.original,
                gradients[0],
                self._asked.variables,
            )
        return output


def _tensors(structure: Any) -> list[tf.Tensor]:
    tensors = []
    for leaf in differences.leaves_of(structure):
        if isinstance(leaf, (tf.Variable, keras.Variable)):
            raise Different("returns variables")
        if isinstance(leaf, tf.Tensor):
            if leaf.dtype in (tf.resource, tf.variant):
                raise Different(f"returns a {leaf.dtype.name}")
            tensors.append(leaf)
    return tensors


def _filled(structure: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """Replace a structure's tensors by the next ones, in their order."""
    leaves = [
        next(tensors) if isinstance(leaf, tf.Tensor) else leaf
        for leaf in differences.leaves_of(structure)
    ]
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
