"""The trace of a step on one tower, as a function that towers call."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.capture import checks, joining, once
from keras_towers.fit.capture.capture import Captured, capture
from keras_towers.fit.capture.checks import CannotShare, CannotSplit
from keras_towers.fit.capture.function import GraphFunction, Way
from keras_towers.fit.capture.pieces import Exchanges, Pieces
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.replica_context import graphs_inside
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.data import batches as data_lib
from keras_towers.splitting import Analysis, Effect
from keras_towers.splitting.growing import Growing


class TracedStep:
    """The trace of a step on one tower, up to where its optimizer begins."""

    def __init__(
        self,
        config: TowerConfig,
        step: Callable[[Any], Any],
        tower: tower_lib.Tower,
        data: Any,
        shared: bool = True,
        way: Way = "called",
        plan: joining.Plan | None = None,
    ):
        xla = way == "xla"
        self._config = config
        self.way: Way = way
        self._shared = shared
        self._plan = plan or {}
        self._outer = compat.get_default_graph()
        self._refused: CannotShare | None = None
        self._update_begins: int | None = None
        self.exchanges: Exchanges = Exchanges()
        # ``tower``, ``data`` and ``captured`` are those inside the trace.
        self.tower = dataclasses.replace(
            tower,
            share=self._share(tower),
            shared=self._refuse if shared else None,
            cut=self._refuse_cut,
            exchange=self.exchanges.note if shared and not xla else None,
            reads=self._read_outside if xla else None,
            joins=self._join if self._plan.get(joining.LOSSES) else None,
        )
        self.data: Any = data
        self.captured: Captured
        self._given = inputs = self._inputs(data, tower)

        def run(*inside: tf.Tensor) -> list[tf.Tensor]:
            with compat.xla_context() if xla else contextlib.nullcontext():
                return self._run(step, inside)

        specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
        # The number of examples is not to become part of the trace, as a number
        # like any other.
        for place, tensor in enumerate(_with_rows(data)):
            if tensor is not None:
                specs[place] = data_lib.of_any_size(specs[place])
        begun = time.monotonic()
        # Inputs are the tensors of ``data``, ``share`` and ``live``, then
        # captures.
        self.graph: Any = self._traced(run, specs)
        self.seconds: float = time.monotonic() - begun
        captures = checks.captures_of(self.graph)
        # For each tower: its variables' handles and other captured tensors.
        self.captures: dict[int, list[Any]] = {tower.local_index: captures}
        self._function: Callable[[Sequence[Any]], list[Any]]

    def finish(self, shapes: Sequence[tf.TensorShape] | None = None) -> None:
        """Make the function that towers call, or raise why there is none."""
        xla = self.way == "xla"
        index = self.tower.local_index
        captures = self.captures[index]
        if self._shared:
            apart = [e.once for e in self.exchanges.all if e.once is not None]
            checks.check_operations(self.graph, apart)
            rows = checks.captures_for_towers(self.graph, self._config, xla)
            self.captures = dict(enumerate(rows))
        if self._update_begins is not None:
            for call in self.captured.updates:
                checks.check_update(call)
            later = self.graph.get_operations()[self._update_begins :]
            checks.check_after_update(self.graph, later)
        resources = [t for t in captures if t.dtype == tf.resource]
        elsewhere = any(checks.owner_of(t) is None for t in resources)
        if self.way == "called" and elsewhere:
            # It uses more than its tower's device (``fit.errors``).
            self.way = "inlined"
        known = [tensor.shape for tensor in self._given]
        # All towers may know less of their tensors of ``data`` than this one.
        known[: len(shapes or ())] = shapes or ()
        if self.exchanges.all:
            self._function = Pieces(
                self.graph, self.exchanges.all, self.way, known
            )
            return
        self._function = function = GraphFunction(self.graph, self.way, known)
        if xla:
            device = self._config.devices[index]
            function.check_xla([*self._given, *captures], device)

    def do_once(self, effects: Sequence[Effect]) -> bool:
        """Let effects happen once for all towers; return whether they can."""
        if self.tower.exchange is None:
            return False
        if not all(map(once.can_happen_once, effects)):
            return False
        by_operation: dict[Any, list[Effect]] = {}
        for effect in effects:
            by_operation.setdefault(effect.at, []).append(effect)
        rank = self._config.transport.rank
        for found in by_operation.values():
            here = not rank or not once.is_seen_outside(found)
            self.exchanges.note_once(found, here)
        return True

    @property
    def results(self) -> list[tf.Tensor]:
        """The outputs of the trace, in order."""
        return _tensors(_results(self.captured))

    def fits(self, analysis: Analysis) -> bool:
        """Whether no rows of one tower meet rows of all towers."""
        return joining.fits(self.graph, self.exchanges.all, analysis)

    def _traced(
        self, run: Callable[..., Any], specs: Sequence[tf.TensorSpec]
    ) -> Any:
        try:
            trace = compat.func_graph_from_py_func
            name = "tower_step"
            graph = joining.JoiningGraph(name, self._plan)
            graph = trace(name, run, specs, {}, func_graph=graph)
        except Exception:
            # Layers raise another exception instead of it.
            if self._refused is not None:
                raise self._refused from None
            raise
        if self._refused is not None:
            # The step has caught it.
            raise self._refused
        return graph

    def _refuse(
        self, why: str, kind: type[CannotShare] = CannotShare
    ) -> NoReturn:
        self._refused = self._refused or kind(why)
        raise self._refused

    def _refuse_cut(self, why: str) -> NoReturn:
        self._refuse(why, CannotSplit)

    def _inputs(self, data: Any, tower: tower_lib.Tower) -> list[tf.Tensor]:
        """Return the inputs in which towers differ, besides their variables."""
        values = [*checks.leaves_of(data), self._share(tower), tower.live]
        if tower.rows is not None:
            values += [tower.rows.start, _unless_known(tower.rows.total)]
        return [value for value in values if isinstance(value, tf.Tensor)]

    def _share(self, tower: tower_lib.Tower) -> Any:
        """Return a tower's share, which depends on the number of examples."""
        several = self._config.num_replicas > 1
        if several and isinstance(tower.share, float):
            return tf.constant(tower.share, tf.float64)
        return tower.share

    def _run(
        self,
        step: Callable[[Any], Any],
        inputs: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Run the step as a function of tensors, in its own graph."""
        given = iter(inputs)
        tower = self.tower
        self.data = _filled(self.data, given)
        tower.common = []
        tower.share = _filled(tower.share, given)
        tower.live = _filled(tower.live, given)
        # Arguments of a function have no operation, by which it is followed
        # what depends on them.
        self.data = tf.nest.map_structure(_with_operation, self.data)
        if tower.rows is not None:
            tower.rows = tower.rows.inside(
                start=_filled(tower.rows.start, given),
                count=data_lib.batch_size_of(self.data),
                total=_filled(_unless_known(tower.rows.total), given),
            )
        tower.data = self.data
        tower.values = Growing()
        tower.values.note_batch(self.data)
        with tf.variable_creator_scope(self._creates):
            captured = capture(step, self.data, tower, self._begin_update)
        self.captured = _with_state_read(captured)
        return _tensors(_results(self.captured))

    def _creates(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_cut("creates variables")

    def _begin_update(self, call: UpdateCall) -> None:
        graph = compat.get_default_graph()
        tower = tower_lib.current()
        if tower is not None and graph is not tower.graph:
            self._refuse_cut("applies gradients in control flow or a function")
        if self._update_begins is None:
            self._update_begins = len(graph.get_operations())

    def _join(self, number: int, loss: tf.Tensor) -> tf.Tensor:
        need = self._plan[joining.LOSSES].get(number)
        return loss if need is None else joining.joined(loss, need)

    def _read_outside(
        self, variable: tf.Variable, read: Callable[[], Any]
    ) -> Any:
        """Read a variable that has no component here before XLA begins."""
        if checks.owner_of(variable.handle) is not None:
            return read()
        tower = tower_lib.current()
        assert tower is not None and tower.graph is not None
        if graphs_inside(tower.graph) is None:
            # Another step may call the function, too.
            self._refuse_cut("reads a variable in a function of its own")
        # XLA uses only variables of the device that it runs on.
        with self._outer.as_default(), tf.device(variable.device):
            return read()

    def __call__(self, data: Any, tower: tower_lib.Tower) -> Captured:
        """Run the step on a tower, up to its updates."""
        inputs = self._inputs(data, tower) + self.captures[tower.local_index]
        outputs = iter(self._function(inputs))
        output, *rows = _filled(_results(self.captured), outputs)
        updates = [
            dataclasses.replace(call, grads=grads)
            for call, grads in zip(self.captured.updates, rows, strict=True)
        ]
        return dataclasses.replace(
            self.captured, output=output, updates=updates
        )


def _unless_known(tensor: tf.Tensor) -> Any:
    """Return a tensor, or its number if known while the step is traced."""
    known = tf.get_static_value(tensor)
    return tensor if known is None else int(known)


def _with_operation(leaf: Any) -> Any:
    if not isinstance(leaf, tf.Tensor):
        return leaf
    return tf.ensure_shape(leaf, leaf.shape)


def _with_rows(data: Any) -> Iterator[tf.Tensor | None]:
    """Yield the tensors of a batch; None for the shape of sparse rows."""
    for leaf in tf.nest.flatten(data):
        shape = leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else None
        for tensor in checks.leaves_of(leaf):
            if isinstance(tensor, tf.Tensor):
                yield None if tensor is shape else tensor


def _results(captured: Captured) -> Any:
    return [captured.output, *(call.grads for call in captured.updates)]


def _with_state_read(captured: Captured) -> Captured:
    """Read the variables of metrics that a step returns as they are."""
    read: dict[int, Any] = {}

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, (tf.Variable, keras.Variable)):
            return leaf
        if not checks.is_of_metric(getattr(leaf, "_value", leaf)):
            # The optimizer may change it before one device reads it.
            raise CannotSplit("returns variables")
        if id(leaf) not in read:
            read[id(leaf)] = tf.identity(tf.convert_to_tensor(leaf))
        return read[id(leaf)]

    results = [
        (metric, tf.nest.map_structure(value_of, result))
        for metric, result in captured.results
    ]
    output = tf.nest.map_structure(value_of, captured.output)
    return dataclasses.replace(captured, output=output, results=results)


def _tensors(structure: Any) -> list[tf.Tensor]:
    tensors = []
    for leaf in checks.leaves_of(structure):
        if isinstance(leaf, tf.Tensor):
            if leaf.dtype in (tf.resource, tf.variant):
                raise CannotSplit(f"returns a {leaf.dtype.name}")
            tensors.append(leaf)
    return tensors


def _filled(structure: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """Replace a structure's tensors by the next ones, in their order."""
    leaves = [
        next(tensors) if isinstance(leaf, tf.Tensor) else leaf
        for leaf in checks.leaves_of(structure)
    ]
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
