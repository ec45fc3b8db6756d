"""The functions that towers call, and what XLA compiles with them.

``tower_program.py`` calls them, level by level.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple

import tensorflow as tf

from keras_towers.fit.places import Places
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.graph.graph_function import CallMode, GraphFunction
from keras_towers.fit.step.graph.placed_tensors import TensorsAt, with_shapes
from keras_towers.fit.step.graph.stacked_lists import StackedLists
from keras_towers.foundation import compat
from keras_towers.partition.emission import (
    emit,
    graph_of,
    graph_of_inputs,
    value_of,
)
from keras_towers.partition.ir.axes import AT_ROOT, MICRO_BATCHES, Axes
from keras_towers.partition.ir.program import (
    Function,
    Operation,
    Phase,
    Tensor,
    needed_operations,
)
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.partition.xla.xla_pieces import Stage, Stages, needs_call
from keras_towers.transport.devices import same_device

# The operations on a variable that XLA compiles.
_COMPILED = (
    "ReadVariableOp",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
)
_NOT_COMPILED = (tf.string, tf.variant)
# All towers' operations up to which calls cost more than they save.
_FEW_OPERATIONS = 250


class Section(NamedTuple):
    """A section of a level, whose operations are added together.

    Attributes:
        level: the level.
        phase: the phase.
        axes: the axes of this process's places that run them.
    """

    level: int
    phase: Phase
    axes: Axes


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a function on each tower.

    Attributes:
        body: what it computes.
        function: the function.
        gate: the tensors for which it waits.
        lists: the dtypes of the elements of lists that XLA takes and returns
            as stacks.
    """

    body: Function
    function: GraphFunction
    gate: Sequence[tf.Tensor] = ()
    lists: Mapping[Tensor, tf.DType | None] = dataclasses.field(
        default_factory=dict
    )

    def add_to_graph(
        self,
        known: MutableMapping[Tensor, tf.Tensor],
        after: Sequence[object] = (),
    ) -> None:
        """Add a call to the current graph.

        Args:
            known: what it takes; gets what it returns.
            after: what has to be computed before.
        """
        with tf.control_dependencies([*self.gate, *after]):
            taken = [value_of(t, known) for t in self.body.inputs]
            if after and self.is_inlined:
                taken = [_after_dependencies(value) for value in taken]
            known.update(with_shapes(self.body.outputs, self._called(taken)))

    @property
    def is_inlined(self) -> bool:
        """Whether nothing waits for the call, but for what it computes."""
        return self.function.mode == "inlined"

    @functools.cached_property
    def _called(self) -> GraphFunction | StackedLists:
        if not self.lists:
            return self.function
        return StackedLists(self.function, self.body, self.lists)


class TowerFunctions:
    """Makes the functions that the towers of a process call in a program.

    Args:
        timeline: when the towers compute what.
        mode: how towers call their functions.
        places: where they compute.
        order: orders the exchanges between processes.

    Attributes:
        xla: what XLA compiles, in the mode ``xla``.
        operations: those of each section.
        once: what is computed once, or once for each column, in stages.
    """

    def __init__(
        self,
        timeline: Timeline,
        mode: CallMode,
        places: Places,
        order: StepOrder,
    ):
        self._program = program = timeline.program
        self._timeline = timeline
        self._micro_batches = places.micro_batches
        self._order = order
        self.xla = Stages(program, places.mesh[0][0])
        self.operations: dict[Section, list[Operation]] = (
            collections.defaultdict(list)
        )
        for operation in program.operations:
            if not operation.is_repeated:
                self.operations[self.section_of(operation)].append(operation)
        self.once: dict[Section, list[Stage]] = {
            section: self.xla.of(here) if mode == "xla" else [Stage([], here)]
            for section, here in self.operations.items()
            if section.phase == Phase.ONCE
        }
        of_tower = sum(o.phase == Phase.TOWERS for o in program.operations)
        if mode == "called" and of_tower * len(places.mesh) <= _FEW_OPERATIONS:
            mode = "inlined"
        self._mode: CallMode = mode
        # By tensor: the sections of levels, outside of its own, that use it.
        self._users: dict[Tensor, set[Hashable]] = self._users_elsewhere()
        self._devices_of_handles: dict[int, str] = compat.devices_of_handles(
            compat.get_default_graph()
        )

    def section_of(self, operation: Operation) -> Section:
        """Return the section of a level that an operation belongs to."""
        phase, axes = operation.phase, operation.axes - AT_ROOT
        if self._micro_batches == 1 or phase != Phase.TOWERS:
            # Whatever is written is the same for all micro-batches.
            axes -= MICRO_BATCHES
        return Section(self._timeline.levels[operation], phase, axes)

    def used(self, operations: Iterable[Operation]) -> list[Tensor]:
        """Return the outputs that are used outside of their section."""
        outputs = [t for o in operations for t in o.outputs]
        return [tensor for tensor in outputs if tensor in self._users]

    def _users_elsewhere(self) -> dict[Tensor, set[Hashable]]:
        """Return the tensors that are used outside of their section.

        Returns:
            For each tensor, the sections of levels that use it, and None for
            any other user.
        """
        program = self._program
        sections: dict[int, Hashable] = {
            id(o): self.section_of(o)
            for o in program.operations
            if not o.is_repeated
        }
        for section, stages in self.once.items():
            for index, stage in enumerate(stages):
                for operation in stage.compiled:
                    sections[id(operation)] = section, index, "compiled"
                for operation in stage.single:
                    sections[id(operation)] = section, index, "single"
        used = {t for exchange in program.exchanges for t in exchange.used}
        used.update(program.results)
        users: dict[Tensor, set[Hashable]] = {tensor: {None} for tensor in used}
        for operation in program.operations:
            # A repeated operation is added wherever it is used.
            repeats = operation.is_repeated
            user = None if repeats else sections[id(operation)]
            for tensor in operation.inputs:
                source = tensor.operation
                if source is not None and (
                    repeats or sections.get(id(source)) != user
                ):
                    users.setdefault(tensor, set()).add(user)
        return users

    def _closure(
        self,
        operations: Sequence[Operation],
        outputs: Sequence[Tensor] | None = None,
    ) -> Function:
        """Return a function of operations, with everything they take as inputs.

        Args:
            operations: the operations.
            outputs: what it returns; by default all that is used elsewhere.
        """
        if outputs is None:
            outputs = self.used(operations)
        used = [t for o in operations for t in o.inputs]
        _, inputs = needed_operations(
            Function((), used, operations), lambda o: o.is_repeated
        )
        return Function(inputs, outputs, operations)

    def call_of(self, operations: Sequence[Operation]) -> FunctionCall | None:
        """Return a call of a function of operations; None if there are none."""
        if not operations:
            return None
        body = self._closure(operations)
        mode = self._mode
        if mode != "xla":
            graph = graph_of(body, self._program.graphs, self._timeline.waits)
            return FunctionCall(body, GraphFunction(graph, mode))
        stages = self.xla.of(operations)
        if [stage.compiled for stage in stages] == [[*operations]]:
            return self._compiled(body)
        # The functions of stages are called in a function that is not compiled.
        graph = graph_of_inputs(
            body.inputs, functools.partial(self._add_body, stages, body)
        )
        return FunctionCall(body, GraphFunction(graph, "called"))

    def _compiled(self, body: Function) -> FunctionCall:
        """Return a call of a function that XLA compiles."""
        graph = graph_of(body, self._program.graphs, self._timeline.waits)
        return self._call_compiled(body, GraphFunction(graph, "xla"))

    def _call_compiled(
        self,
        body: Function,
        function: GraphFunction,
        gate: Sequence[tf.Tensor] = (),
    ) -> FunctionCall:
        ends = (*body.inputs, *body.outputs)
        lists = {
            tensor: self.xla.stackable.dtype_of(tensor)
            for tensor in ends
            if tensor.dtype == tf.variant
        }
        return FunctionCall(body, function, gate, lists)

    def _add_body(
        self,
        stages: Sequence[Stage],
        body: Function,
        known: dict[Tensor, tf.Tensor],
    ) -> list[tf.Tensor]:
        """Add a body in stages to the current graph; return its results."""
        users = [o for o in self._program.operations if o.is_repeated]
        users += body.operations

        def used(operations: Sequence[Operation]) -> list[Tensor]:
            own = {id(o) for o in operations}
            inputs = {t for o in users if id(o) not in own for t in o.inputs}
            inputs.update(body.outputs)
            return [t for o in operations for t in o.outputs if t in inputs]

        self.add_stages(stages, known, used)
        return emit([], known, body.outputs)

    def add_stages(
        self,
        stages: Sequence[Stage],
        known: MutableMapping[Tensor, tf.Tensor],
        used: Callable[[Sequence[Operation]], list[Tensor]],
        **options: object,
    ) -> None:
        """Add stages to the current graph.

        Args:
            stages: the stages.
            known: the tensors that they use; gets those that they compute.
            used: returns the outputs of operations that are used elsewhere.
            **options: of ``emit``, for operations that are not compiled.
        """
        for stage in stages:
            if needs_call(stage.compiled):
                body = self._closure(stage.compiled, used(stage.compiled))
                self._compiled(body).add_to_graph(known)
            else:
                self._add_single(stage.compiled, known, used)
            self._add_single(stage.single, known, used, **options)

    def _add_single(
        self,
        operations: Sequence[Operation],
        known: MutableMapping[Tensor, tf.Tensor],
        used: Callable[[Sequence[Operation]], list[Tensor]],
        **options: Any,
    ) -> None:
        """Add operations to the current graph without XLA."""
        outputs, graphs = used(operations), self._program.graphs
        kernels = self.xla.kernels if self._mode == "xla" else None
        values = emit(
            operations,
            known,
            outputs,
            graphs,
            kernels=kernels,
            waits=self._timeline.waits,
            **options,
        )
        known.update(zip(outputs, values, strict=True))

    def with_variables(
        self,
        call: FunctionCall,
        reads: Sequence[Operation],
        writes: Sequence[Operation],
        towers: Sequence[TensorsAt],
    ) -> tuple[FunctionCall, Sequence[Operation], Sequence[Operation]]:
        """Let a compiled function read and write the variables itself.

        XLA's kernel reads and assigns all of them at once and in place. The
        graph would need an operation for each.

        Returns:
            The call, and the reads that remain before it and the writes after.
        """
        if call.function.mode != "xla" or self._micro_batches > 1:
            return call, reads, writes
        body = call.body
        sections = set(map(self.section_of, body.operations))
        after: Sequence[Operation] = []
        if all(self._can_be_compiled(o, towers) for o in writes):
            sections.update(map(self.section_of, writes))
        else:
            # They keep their order.
            after, writes = writes, after

        def is_used(tensor: Tensor) -> bool:
            return not self._users.get(tensor, set()) <= sections

        before = []
        for operation in reads:
            if any(map(is_used, operation.outputs)) or (
                not self._can_be_compiled(operation, towers)
            ):
                before.append(operation)
        reads = [operation for operation in reads if operation not in before]
        if not reads and not writes:
            return call, before, after
        ends = [*body.outputs, *(t for o in writes for t in o.outputs)]
        whole = self._closure(
            [*reads, *body.operations, *writes],
            outputs=[tensor for tensor in ends if is_used(tensor)],
        )
        graphs = self._program.graphs

        def run(known: dict[Tensor, tf.Tensor]) -> list[tf.Tensor]:
            values = [t for o in reads for t in o.outputs]
            known |= zip(
                values, emit(reads, known, values, graphs), strict=True
            )
            results = call.function([value_of(t, known) for t in body.inputs])
            known |= zip(body.outputs, results, strict=True)
            return emit(writes, known, whole.outputs, graphs)

        function = GraphFunction(graph_of_inputs(whole.inputs, run), "xla")
        compiled = self._call_compiled(whole, function, self._order.gate)
        return compiled, before, after

    def _can_be_compiled(
        self, operation: Operation, towers: Sequence[TensorsAt]
    ) -> bool:
        """Whether XLA can do what towers do with their variables."""
        if operation.type not in _COMPILED:
            return False
        for tensor in operation.inputs:
            if tensor.handle is None:
                continue
            dtype, shape = tensor.type_of_content
            if dtype in _NOT_COMPILED or not shape.is_fully_defined():
                return False
            # XLA uses no variables of other devices. An accelerator has none of
            # int32, which TensorFlow keeps on the host.
            for here in towers:
                handle = value_of(tensor, here)
                device = self._devices_of_handles.get(id(handle), "")
                if not same_device(device, here.device):
                    return False
        return True


def _after_dependencies(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor after the control dependencies of this block."""
    # TensorFlow would not recognize a copy of a handle as a constant.
    if tensor.dtype in (tf.resource, tf.variant):
        return tensor
    return tf.identity(tensor)
