"""The trace of a step on one device, which is then divided over towers.

``global_step.py`` traces; ``step_layout.py`` divides the ``Trace``.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from keras_towers.fit.components import TRAINING, ApplyCall
from keras_towers.fit.context import thread_state
from keras_towers.fit.context.remat_scopes import RematScopes
from keras_towers.fit.data.batches import tensors_in
from keras_towers.fit.step.graph.fixed_tables import content_of_fixed
from keras_towers.fit.weights.copies import copy_on_tower, native, read_later
from keras_towers.fit.weights.model_state import collect, optimizers_in
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Step, Structure, Variable
from keras_towers.partition.ir.effects import called_graphs, written
from keras_towers.partition.ir.layouts import MeshLayout
from keras_towers.partition.timeline.segments import Segments
from keras_towers.reduction.gradients import Gradient, scaled

if TYPE_CHECKING:
    from keras_towers.fit.update.weight_update import WeightUpdate

# Calls whose functions take their last inputs.
_CALLS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "Stateless", "Stateful")
    for name in ("PartitionedCall", "If", "Case", "While")
)
ResultT = TypeVar("ResultT")
_Needed: TypeAlias = "dict[tf.Graph, dict[str, tf.Operation]]"


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """The trace of a step on one device.

    Attributes:
        graph: its operations; its inputs are the leaves of the batch, then
            ``captures``.
        captures: the tensors of the outer graph that it uses.
        updates: the calls of optimizers, in their order, by the names of the
            operations that return gradients to them.
        output: the return value of the step, with the graph's tensors.
        layouts: how to lay out what these operations return.
        in_updates: the operations of updates, by name: where they run if they
            are computed once; "": on the first tower.
        is_whole: whether it has the updates; if not, gradients are results.
        segments: what users let be computed again; None: nothing.
    """

    graph: tf.Graph
    captures: Sequence[tf.Tensor]
    updates: Mapping[str, ApplyCall]
    output: Structure
    layouts: Mapping[str, Sequence[MeshLayout]]
    in_updates: Mapping[str, str]
    is_whole: bool
    segments: Segments | None = None

    @property
    def results(self) -> list[tf.Tensor]:
        """The tensors in the output."""
        return tensors_in(self.output)

    @property
    def wanted(self) -> list[tf.Tensor]:
        """The tensors in the output, and gradients that are results."""
        ends = [] if self.is_whole else [*self.layouts]
        returned = map(self.graph.get_operation_by_name, ends)
        return [*self.results, *(t for o in returned for t in o.outputs)]

    def gradients_in(
        self, results: Sequence[ResultT]
    ) -> dict[str, list[ResultT]]:
        """Return the gradients among some results, by the name of a call."""
        left = iter(results[len(self.results) :])
        return {
            name: list(itertools.islice(left, len(self.layouts[name])))
            for name in self.updates
            if not self.is_whole
        }

    def call_with(self, name: str, components: Sequence[Any]) -> ApplyCall:
        """Return the call of an optimizer with other gradients."""
        call = self.updates[name]
        grads = with_components(call.grads, components)
        return dataclasses.replace(call, grads=grads)

    @property
    def needed(self) -> list[tf.Operation]:
        """The operations on which results, gradients and variables depend.

        They include those of called functions. What a step only prints
        or writes to a summary is not among them.
        """
        graphs = self.needed_by_graph.values()
        return [
            operation for by_name in graphs for operation in by_name.values()
        ]

    @property
    def needed_captures(self) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Return the captures that some tensors need: inside, and outside."""
        by_name = self.needed_by_graph[self.graph]
        captures = zip(self._captured, self.captures, strict=True)
        return [pair for pair in captures if pair[0].op.name in by_name]

    @functools.cached_property
    def fixed_tables(self) -> dict[int, str]:
        """The contents of fixed tables, by the ids of their captures."""
        tables: dict[int, str] = {}
        for inside, handle in self.needed_captures:
            users = {user.type: user for user in inside.consumers()}
            find = users.get("LookupTableFindV2")
            if find is not None and not tf.is_symbolic_tensor(handle):
                dtypes = find.get_attr("Tin"), find.get_attr("Tout")
                content = content_of_fixed(handle, *dtypes)
                tables |= {} if content is None else {id(handle): content}
        return tables

    @functools.cached_property
    def needed_by_graph(self) -> _Needed:
        """The operations that are needed, by graph and name."""
        needed: _Needed = {}
        ends = [tensor.op for tensor in self.results]
        ends += map(self.graph.get_operation_by_name, self.updates)
        _add_needed(needed, self.graph, ends)
        return needed

    @property
    def written(self) -> list[tf.Tensor]:
        """The captures of the outer graph that are variables it writes."""
        changed = {
            id(operation.inputs[k])
            for operation in self.graph.get_operations()
            for k in written(operation)
        }
        captures = zip(self._captured, self.captures, strict=True)
        return [
            outside for inside, outside in captures if id(inside) in changed
        ]

    def variables_outside(self, model: keras.Model) -> list[tf.Tensor]:
        """Return the handles of variables that the model lacks.

        Such as a ``tf.Variable``, or the weights of another model, that no
        layer of the model has. A variable that only a summary shows is not
        among them.
        """
        captured = [t for _, t in self.needed_captures]
        used: list[Any] = [t for t in captured if t.dtype == tf.resource]
        for call in self.updates.values():
            for part in optimizers_in(call.optimizer):
                used += map(handle_of, part.variables)
        own = {id(handle_of(v)) for v in collect(model).everything()}
        outside = {id(t): t for t in used if id(t) not in own}
        return [t for t in outside.values() if _is_variable(t)]

    def output_with(self, results: Sequence[tf.Tensor]) -> Structure:
        """Return the output with other tensors."""
        remaining = iter(results)
        leaves = [
            next(remaining) if isinstance(leaf, tf.Tensor) else leaf
            for leaf in tf.nest.flatten(self.output, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(
            self.output, leaves, expand_composites=True
        )

    @property
    def gradients(self) -> dict[str, tuple[ApplyCall, Variable]]:
        """The call and the weight of each component of a gradient, by name."""
        return {
            tensor.name: (call, weight)
            for call in self.updates.values()
            for gradient, weight in zip(call.grads, call.variables, strict=True)
            for tensor in components_of(gradient)
        }

    @property
    def _captured(self) -> Sequence[tf.Tensor]:
        """The tensors inside the graph for its captures."""
        first = len(self.graph.inputs) - len(self.captures)
        return self.graph.inputs[first:]


def handle_of(variable: Variable) -> tf.Tensor | None:
    """Return the handle of a variable's first copy; None: on another rank."""
    return getattr(copy_on_tower(native(variable), 0), "handle", None)


def _is_variable(handle: tf.Tensor) -> bool:
    dtype = compat.type_of_variable(handle)
    others = (tf.resource, tf.variant)
    return dtype is not None and tf.as_dtype(dtype) not in others


def _add_needed(
    needed: _Needed, graph: tf.Graph, ends: Iterable[tf.Operation]
) -> None:
    """Add the needed operations of a graph, and of functions that it calls."""
    by_name: dict[str, tf.Operation] = {}
    needed[graph] = by_name
    waiting = [*ends, *(o for o in graph.get_operations() if written(o))]
    while waiting:
        operation = waiting.pop()
        if operation.name not in by_name:
            by_name[operation.name] = operation
            waiting += [tensor.op for tensor in _operands(needed, operation)]


def _operands(needed: _Needed, operation: tf.Operation) -> list[tf.Tensor]:
    """Return the inputs that an operation needs."""
    graphs = called_graphs(operation)
    for graph in graphs:
        if graph is not None and graph not in needed:
            _add_needed(needed, graph, [tensor.op for tensor in graph.outputs])
    inputs = list(operation.inputs)
    if operation.type not in _CALLS or not graphs or None in graphs:
        return inputs
    first = len(inputs) - len(graphs[0].inputs)
    used = {
        first + k
        for graph in graphs
        for k, inside in enumerate(graph.inputs)
        if inside.op.name in needed[graph]
    }
    return [t for k, t in enumerate(inputs) if k < first or k in used]


def trace(
    step: Step,
    batch: Structure,
    kind: str,
    build: Callable[[keras.Optimizer, Sequence[Variable]], None],
    place: Callable[[], None] = lambda: None,
    own_statistics: bool = False,
    xla: bool = False,
    find_placement: Callable[[], compat.TracePlacement | None] = lambda: None,
    update: WeightUpdate | None = None,
    active: thread_state.ActiveStep | None = None,
    again: bool = True,
) -> Trace:
    """Trace a step of Keras on a batch, as one device runs it.

    As by a ``tf.function``, it is traced once more if that makes variables.

    Args:
        step: a function of a batch.
        batch: the specs of a batch.
        kind: the method of Keras that the step belongs to.
        build: builds an optimizer for weights, unless it is built.
        place: places variables that the step has made.
        own_statistics: whether BatchNormalization computes statistics for each
            tower's rows separately.
        xla: whether XLA is to compile it.
        find_placement: returns where variables are, as for ``trace_context``.
        update: traces calls of optimizers; None: gradients are results.
        active: the step of a tower that trains a batch of its own.
        again: whether to trace it once more. If not, a step that makes
            variables must not run.

    Raises:
        TowerError: it makes variables each time, or uses a value that is no
            part of the batch.
    """
    leaves = tf.nest.flatten(batch, expand_composites=True)
    specs = [leaf for leaf in leaves if leaf is not None]
    outer, draw_counts = compat.get_default_graph(), compat.draws_of_graphs

    def trace_once() -> tuple[tf.Graph, _TracedCalls]:
        calls = _TracedCalls(build, update)

        def run(*tensors: tf.Tensor) -> Structure:
            left = iter(tensors)
            inside = [None if leaf is None else next(left) for leaf in leaves]
            data = tf.nest.pack_sequence_as(
                batch, inside, expand_composites=True
            )
            graph = compat.get_default_graph()
            # Draws without a seed continue the count of the outer graph, which
            # may have several steps.
            draw_counts[graph] = draw_counts.get(outer, 0)

            calls.graph = graph
            alone = thread_state.ActiveStep(
                training=kind in TRAINING, apply=calls.note
            )
            tracing = dataclasses.replace(
                active or alone,
                apply=calls.note,
                graph=graph,
                own_statistics=own_statistics,
                remat=calls.remat,
                first_call=calls.first_call,
            )
            with (
                thread_state.tracing(tracing),
                compat.trace_context(xla, find_placement()),
                calls.first_call.makes(),
            ):
                return step(data)

        with compat.single_device_mode():
            graph = compat.func_graph_from_py_func("one_device", run, specs, {})
        return graph, calls

    graph, calls = trace_once()
    if calls.first_call.makes_variables:
        calls.first_call.initialize()
        with compat.unseen():
            place()
        if again:
            # The next trace takes the place of this one.
            del graph, calls
            gc.collect(0)
            graph, calls = trace_once()
            if calls.first_call.makes_variables:
                raise TowerError(
                    "the step makes a variable each time that it is traced, "
                    "and TensorFlow traces it more than once: make it only "
                    "once, such as in __init__, or if an attribute is None."
                )
    draw_counts[outer] = draw_counts.get(graph, 0)
    calls.find_later_reads()
    if len(graph.inputs) != len(specs) + len(graph.captures):
        raise TowerError(
            "the step uses a value that is known only when it runs, and that "
            "is not part of the batch: towers cannot divide it. Pass it as "
            "part of the batch."
        )
    return Trace(
        graph,
        [outside for outside, _ in graph.captures],
        calls.updates,
        graph.structured_outputs,
        calls.layouts,
        calls.in_updates,
        not calls.are_results,
        calls.remat.segments_of(graph),
    )


class _TracedCalls:
    """The calls of optimizers in a step that is traced.

    Args:
        build: as for ``trace``.
        update: as for ``trace``.

    Attributes:
        graph: the graph of the step, once its tracing has begun.
        first_call: makes the variables of the step.
        remat: notes what is to be computed again.
        are_results: whether gradients are results of the step.
        updates: the calls, as in ``Trace``, like the next two.
    """

    graph: tf.Graph

    def __init__(
        self,
        build: Callable[[keras.Optimizer, Sequence[Variable]], None],
        update: WeightUpdate | None,
    ):
        self._build, self._update = build, update
        self.first_call, self.remat = compat.FirstCall(), RematScopes()
        self.are_results: bool = update is None or update.pushes
        self.updates: dict[str, ApplyCall] = {}
        self.layouts: dict[str, Sequence[MeshLayout]] = {}
        self.in_updates: dict[str, str] = {}
        # The number of operations before each gradient that is a result.
        self._begun: dict[str, int] = {}

    def note(self, call: ApplyCall) -> None:
        """Note a call; trace it, unless its gradients are results."""
        # Slots may begin with values of their weights.
        self.first_call.initialize()
        self._build(call.optimizer, call.variables)
        grads = map(_with_dense_shape, call.grads, call.variables)
        call, update = dataclasses.replace(call, grads=[*grads]), self._update
        name, call, layouts = _handed_over(call, update)
        self.updates[name], self.layouts[name] = call, layouts
        before = len(self.graph.get_operations())
        if update is None or self.are_results:
            self._begun[name] = before
            return
        update.apply_in_trace(call)
        for operation in self.graph.get_operations()[before:]:
            kept = operation.device if update.sharding.keeps_devices else ""
            self.in_updates[operation.name] = kept

    def find_later_reads(self) -> None:
        """Note which variables of each call the step reads after it."""
        for name, before in self._begun.items():
            call = self.updates[name]
            later = read_later(call, self.graph, before)
            self.updates[name] = dataclasses.replace(call, read_later=later)


def _handed_over(
    call: ApplyCall, update: WeightUpdate | None
) -> tuple[str, ApplyCall, list[MeshLayout]]:
    """Add an operation that returns gradients to an optimizer.

    Args:
        call: the call of the optimizer, with the gradients that it is to get.
        update: says how they are laid out; None: whole.

    Returns:
        The name of the operation, the call with what it returns, and the layout
        of each of its outputs.
    """
    layouts: list[MeshLayout | None] = [MeshLayout()] * len(call.grads)
    if update is not None:
        factor = update.config.gradient_factor
        call = dataclasses.replace(call, grads=scaled(call.grads, factor))
        layouts = list(map(update.gradient_layout, call.grads, call.variables))
        shaped = map(_with_shape, call.grads, call.variables, layouts)
        call = dataclasses.replace(call, grads=list(shaped))
    pairs = list(zip(call.grads, layouts, strict=True))
    handed = [gradient for gradient, layout in pairs if layout is not None]
    components = [t for gradient in handed for t in components_of(gradient)]
    if not components:
        return tf.no_op("gradients").name, call, []
    returned = tf.raw_ops.IdentityN(input=components, name="gradients")
    new = iter(with_components(handed, returned))
    grads = [g if layout is None else next(new) for g, layout in pairs]
    of_components = [
        layout for g, layout in pairs if layout for _ in components_of(g)
    ]
    call = dataclasses.replace(call, grads=grads)
    return returned[0].op.name, call, of_components


def _with_shape(
    gradient: Gradient | None, weight: Variable, layout: MeshLayout | None
) -> Gradient | None:
    """Return a gradient with the shape of its weight, if that is divided.

    The trace may not know it, such as of a layer whose input has no width. An
    operation that ensures it would have to be divided, too.
    """
    is_divided = layout is not None and layout.divides
    if not is_divided or not isinstance(gradient, tf.Tensor):
        return gradient
    if gradient.shape.is_fully_defined():
        return gradient
    gradient.set_shape(weight.shape)
    return gradient


def _with_dense_shape(
    gradient: Gradient | None, variable: Any
) -> Gradient | None:
    """Return a gradient of rows with the shape of its variable."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.constant(list(variable.shape), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def components_of(gradient: Gradient | None) -> list[tf.Tensor]:
    """Return the tensors of a gradient: values and indices, or one, or none."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def with_components(
    like: Sequence[Gradient | None], components: Sequence[Any]
) -> list[Gradient | None]:
    """Return gradients like others, given new component tensors."""
    remaining = iter(components)
    grads: list[Gradient | None] = []
    for gradient in like:
        parts = list(itertools.islice(remaining, len(components_of(gradient))))
        if len(parts) == 2 and parts[0] is not None:
            values, indices = parts
            assert isinstance(gradient, tf.IndexedSlices)
            sizes: Any = gradient.shape.as_list()
            shape = tf.constant(sizes, tf.int64)
            grads.append(tf.IndexedSlices(values, indices, shape))
        else:
            grads.append(parts[0] if parts else None)
    return grads
