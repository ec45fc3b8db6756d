"""The trace of a step on one tower, as a function that towers call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.origins import Origins
from keras_towers.fit.contract import TakesGradients, TowerConfig
from keras_towers.fit.step import differences
from keras_towers.fit.step.bodies import Body
from keras_towers.fit.step.differences import Different, Whole
from keras_towers.fit.step.draws import graphs_inside
from keras_towers.fit.step.xla import XlaBody
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
            tower.is_whole("applies gradients in control flow or a function")
        variables = trainable_variables
        if variables is not None:
            # It may be an iterator, and is asked for by every tower.
            variables = list(variables)
        place = len(graph.get_operations())
        asked = _Asked(optimizer, original, variables, list(grads), place)
        self.asked.append(asked)


class TowerTrace:
    """The trace of a step on one tower, up to where its optimizer begins.

    Args:
        config: the towers.
        step: takes a tower's part of the batch.
        tower: the tower; the first one, if all call the trace.
        data: its part.
        note: called in the trace with what the step returns and with the
            results of metrics; or None.
        shared: whether all towers call it, not only this one.
        xla: whether XLA compiles it.

    Attributes:
        graph: the trace.

    Raises:
        Different: it cannot be that of other towers.
        Whole: it cannot be cut there.
        Uncompilable: XLA cannot compile it.
    """

    def __init__(
        self,
        config: TowerConfig,
        step: Callable[[Any], Any],
        tower: tower_lib.Tower,
        data: Any,
        note: Callable[[Any, Any], None] | None,
        shared: bool = True,
        xla: bool = False,
    ):
        self._step = step
        self._xla = xla
        self._outer = compat.get_default_graph()
        self._data = data
        self._note = note
        self._refused: Different | None = None
        self._body: Body
        self._output: Any = None
        self._recorder = _Recorder(tower.update)
        self._tower = dataclasses.replace(
            tower,
            update=self._recorder,
            results=[],
            shared=self._refuse if shared else None,
            cut=self._refuse_cut,
            reads=self._read_outside if xla else None,
        )
        inputs = self._inputs(data, tower)
        self.graph = self._graph(inputs)
        asked = self._recorder.asked
        if len(asked) > 1:
            raise Whole("calls optimizers several times")
        self._asked = asked[0] if asked else None
        captures = differences.captures_of(self.graph)
        self._captures = {tower.local_index: captures}
        if shared:
            differences.check_operations(self.graph)
            rows = differences.captures_for_towers(self.graph, config, xla)
            self._captures = dict(enumerate(rows))
        if self._asked is not None:
            variables = gradients_lib.variables_of(
                self._asked.optimizer, self._asked.variables
            )
            differences.check_update(self._asked.optimizer, variables)
            later = self.graph.get_operations()[self._asked.place :]
            differences.check_after_update(self.graph, later)
        if not xla:
            self._body = Body(self.graph)
            return
        self._body = body = XlaBody(self.graph)
        device = config.devices[tower.local_index]
        body.check([*inputs, *captures], device)

    def _graph(self, inputs: Sequence[tf.Tensor]) -> Any:
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
        trace = compat.func_graph_from_py_func
        try:
            graph = trace("tower_step", self._run, specs, {})
        except Exception:
            # Layers raise another exception instead of it.
            if self._refused is not None:
                raise self._refused from None
            raise
        if self._refused is not None:
            # The step has caught it.
            raise self._refused
        return graph

    def _refuse(self, why: str, kind: type[Different] = Different) -> NoReturn:
        self._refused = self._refused or kind(why)
        raise self._refused

    def _refuse_cut(self, why: str) -> NoReturn:
        self._refuse(why, Whole)

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
            compat.xla_context() if self._xla else contextlib.nullcontext(),
            tf.variable_creator_scope(self._creates),
            replica_context.activate(tower),
        ):
            self._output = self._step(data)
            if self._note is not None:
                self._note(self._output, tower.results)
        return _tensors(self._results())

    def _creates(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_cut("creates variables")

    def _read_outside(
        self, variable: tf.Variable, read: Callable[[], Any]
    ) -> Any:
        """Read what has no component on the tower before XLA begins.

        XLA uses only variables of the device that it runs on.
        """
        if differences.owner_of(variable.handle) is not None:
            return read()
        assert self._tower.graph is not None
        if graphs_inside(self._tower.graph) is None:
            # Another step may call the function, too.
            self._refuse_cut("reads a variable in a function of its own")
        with self._outer.as_default(), tf.device(variable.device):
            return read()

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
            raise Whole("returns variables")
        if isinstance(leaf, tf.Tensor):
            if leaf.dtype in (tf.resource, tf.variant):
                raise Whole(f"returns a {leaf.dtype.name}")
            tensors.append(leaf)
    return tensors


def _filled(structure: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """Replace a structure's tensors by the next ones, in their order."""
    leaves = [
        next(tensors) if isinstance(leaf, tf.Tensor) else leaf
        for leaf in differences.leaves_of(structure)
    ]
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
