"""A program as the towers run it: a function per level."""

from __future__ import annotations

import dataclasses
import functools
from collections import ChainMap
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_device
from keras_towers.fit.step.exchanges import exchange_tensors
from keras_towers.fit.step.graph_function import (
    CallMode,
    GraphFunction,
    Uncompilable,
)
from keras_towers.fit.step.places import Place, value_of, with_shapes
from keras_towers.fit.step.step_order import StepOrder
from keras_towers.partition.assumed import AssumedBatch
from keras_towers.partition.program import (
    Exchange,
    Function,
    Operation,
    Phase,
    Program,
    Tensor,
    Update,
    emit,
    graph_of,
    graph_of_inputs,
    needed_operations,
)
from keras_towers.partition.resources import type_of_content
from keras_towers.partition.stages import Stage, needs_call, stages_of
from keras_towers.transport import SingleProcess, Transport

# The numbers of rows of a tower to try, in turn, when XLA compiles a function:
# small ones are cheap, but an image must not be smaller than a kernel, some
# steps need a multiple of a number, and a tower has no more rows than a batch
# whose size is known.
_TRIED_ROWS = (8, 64, 840, 1)
# What XLA does with a variable.
_COMPILED = (
    "ReadVariableOp",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
)
_NOT_COMPILED = (tf.string, tf.variant)
# All towers' operations up to which calls cost more than they save.
_FEW_OPERATIONS = 250


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a function on each tower.

    Attributes:
        body: what it computes.
        function: the function.
        gate: the tensors for which it waits.
    """

    body: Function
    function: GraphFunction
    gate: Sequence[Any] = ()


class TowerProgram:
    """Adds a program to the current graph, for the towers of this process.

    Args:
        program: the program.
        mode: how towers call their functions; functions that XLA cannot compile
            are called without it.
        mesh: for each of K towers, the devices of its M columns.
        transport: connects the processes.
        order: orders the exchanges between processes.

    Attributes:
        not_compiled: for each function that XLA cannot compile, the reason, and
            the traced operation that is one, if XLA names it.
        compiled: the number of functions that XLA compiles.
    """

    def __init__(
        self,
        program: Program,
        mode: CallMode,
        mesh: Sequence[Sequence[str]],
        transport: Transport,
        order: StepOrder,
    ):
        self.not_compiled: list[tuple[str, Any]] = []
        self.compiled = 0
        self._program = program
        self._mode: CallMode = mode
        self._mesh = mesh
        # Where towers compute what all of their columns share.
        self._devices: list[str] = [row[0] for row in mesh]
        self._transport = transport
        self._order = order
        # By level: what is computed once, or once for each column.
        self._once = {
            (level, on_columns): self._stages(
                o
                for o in program.of_level(level)
                if not o.on_towers and o.on_columns == on_columns
            )
            for level in range(program.levels)
            for on_columns in (False, True)
        }
        self._assumed: list[AssumedBatch] = []
        on_towers = [o for o in program.operations if o.phase == Phase.TOWERS]
        self._is_small: bool = len(on_towers) * len(mesh) <= _FEW_OPERATIONS
        # By tensor: the sections of levels, outside of its own, that use it.
        self._users: dict[Tensor, set[Any]] = {}
        self._devices_of_handles: dict[int, str] = {}
        self._summed = _summed(program)

    def add_to_graph(
        self,
        common: Mapping[Tensor, Any],
        parts: Sequence[dict[Tensor, Any]],
        update: Callable[[Update, list[list[Any]], list[Any]], None],
        of_columns: Sequence[Mapping[Tensor, Any]] = (),
        of_cells: Sequence[Sequence[dict[Tensor, Any]]] = (),
    ) -> list[Any]:
        """Add the program to this graph; return its results.

        Args:
            common: the inputs that all towers share.
            parts: the inputs of each micro-batch, in tower order; each tower
                computes the same number of them, one after another.
            update: called with an update, K lists of the towers' gradients, and
                a list of the gradients that all towers share.
            of_columns: the inputs of each of M columns, if there are any.
            of_cells: for each tower, the inputs of its M columns.
        """
        program, devices = self._program, self._devices
        known = dict(common)
        number = len(parts) // len(devices)
        self._users = self._users_elsewhere(number)
        self._devices_of_handles = compat.devices_of_handles(
            compat.get_default_graph()
        )
        self._assumed = [
            AssumedBatch(program, len(parts) * self._transport.size, rows)
            for rows in _TRIED_ROWS
        ]
        towers = [
            Place(
                device,
                [
                    [part, known]
                    for part in parts[k * number : (k + 1) * number]
                ],
            )
            for k, device in enumerate(devices)
        ]
        columns: list[ChainMap[Tensor, Any]] = [
            ChainMap(dict(own), known) for own in of_columns
        ]
        cells = [
            [
                Place(
                    device,
                    [
                        [{}, own, *part.maps[:-1], *column.maps]
                        for part in tower.parts
                    ],
                )
                for device, own, column in zip(
                    row, inputs, columns, strict=True
                )
            ]
            for row, tower, inputs in zip(
                self._mesh, towers, of_cells, strict=False
            )
        ]
        of_all_cells = [cell for row in cells for cell in row]
        checks: list[Any] = []
        for level in range(program.levels):
            self._compute_stages(level, known, devices[0], False, checks)
            for device, column in zip(self._mesh[0], columns, strict=False):
                self._compute_stages(level, column, device, True, checks)
            operations = program.of_level(level)
            for on_columns, places in ((False, towers), (True, of_all_cells)):
                here = [o for o in operations if o.on_columns == on_columns]
                self._run_level(here, places, number)
            exchanges = [e for e in program.exchanges if e.given.level == level]
            if exchanges:
                self._exchange(exchanges, known, towers, columns, cells)
            for change in program.updates:
                if change.level != level:
                    continue
                gradients = [tower.gradients(change) for tower in towers]
                common_grads = [
                    None if t.on_towers else value_of(t, known)
                    for t in change.given
                ]
                with tf.control_dependencies(checks):
                    update(change, gradients, common_grads)
        with tf.device(devices[0]):
            return [value_of(t, known) for t in program.results]

    def _compute_stages(
        self,
        level: int,
        known: MutableMapping[Tensor, Any],
        device: str,
        on_columns: bool,
        checks: list[Any],
    ) -> None:
        """Add what is computed once in a level, or once for a column."""
        with tf.device(device):
            for stage in self._once[level, on_columns]:
                if stage.compiled:
                    self._compute_in_function(stage.compiled, known)
                self._compute_once(stage.single, known, checks)

    def _run_level(
        self,
        operations: Sequence[Operation],
        places: Sequence[Place],
        number: int,
    ) -> None:
        """Add what towers, or all of their columns, do in a level.

        Args:
            operations: the operations.
            places: the towers, or the columns of all towers.
            number: the number of micro-batches.
        """
        by_phase: dict[Phase, list[Operation]] = {p: [] for p in Phase}
        for operation in operations:
            by_phase[operation.phase].append(operation)
        reads: Sequence[Operation] = by_phase[Phase.READ]
        writes: Sequence[Operation] = by_phase[Phase.WRITE]
        of_parts = by_phase[Phase.TOWERS]
        shared: list[Operation] = []
        if number > 1:
            # What micro-batches share, a tower computes once.
            shared = [o for o in of_parts if not _is_of_batch(o)]
            of_parts = [o for o in of_parts if _is_of_batch(o)]
        call = self._call_of(of_parts)
        if call and call.function.mode == "xla" and number == 1:
            call, reads, writes = self._with_variables(
                call, reads, writes, places
            )
        for place in places:
            self._access_variables(reads, place)
        self._compute_on_towers(self._call_of(shared), places, once=True)
        self._compute_on_towers(call, places)
        for place in places:
            self._access_variables(writes, place)

    def _stages(self, operations: Iterable[Operation]) -> list[Stage]:
        """Divide what is computed once in a level into stages."""
        if self._mode == "xla":
            return stages_of(list(operations))
        return [Stage(single=list(operations))]

    def _users_elsewhere(self, number: int) -> dict[Tensor, set[Any]]:
        """Return tensors that are used outside of where they are computed.

        Args:
            number: the number of micro-batches of a tower.

        Returns:
            For each tensor, the sections of levels that use it, and None for
            any other user.
        """
        program = self._program
        sections: dict[int, Any] = {
            id(o): _section(o, number) for o in program.operations
        }
        for where, stages in self._once.items():
            for index, stage in enumerate(stages):
                for operation in stage.compiled:
                    sections[id(operation)] = where, "compiled", index
        used = {t for exchange in program.exchanges for t in exchange.used}
        used.update(program.results)
        for update in program.updates:
            used.update(update.given)
        users: dict[Tensor, set[Any]] = {tensor: {None} for tensor in used}
        for operation in program.operations:
            # What is repeated is added wherever it is used.
            repeats = operation.is_repeated
            user = None if repeats else sections[id(operation)]
            for tensor in operation.inputs:
                source = tensor.operation
                if source is not None and (
                    repeats or sections[id(source)] != user
                ):
                    users.setdefault(tensor, set()).add(user)
        return users

    def _compute_in_function(
        self,
        operations: Sequence[Operation],
        known: MutableMapping[Tensor, Any],
    ) -> None:
        """Add operations that are computed once as a function."""
        body = self._closure(operations)
        function = self._function(body) if needs_call(operations) else None
        if function is None:
            values = emit(operations, known, body.outputs, self._program.graphs)
        else:
            values = function([value_of(t, known) for t in body.inputs])
        known.update(with_shapes(body.outputs, values))

    def _closure(
        self,
        operations: Sequence[Operation],
        outputs: Sequence[Tensor] | None = None,
    ) -> Function:
        """Return a function of all that operations take from outside.

        Args:
            operations: the operations.
            outputs: what it returns; by default all that is used elsewhere.
        """
        if outputs is None:
            made = [t for o in operations for t in o.outputs]
            outputs = [tensor for tensor in made if tensor in self._users]
        used = [t for o in operations for t in o.inputs]
        _, inputs = needed_operations(
            Function((), used, operations), lambda o: o.is_repeated
        )
        return Function(inputs, outputs, operations)

    def _compute_once(
        self,
        operations: Sequence[Operation],
        known: MutableMapping[Tensor, Any],
        checks: list[Any],
    ) -> None:
        """Add operations that each process computes, or only the first one."""
        is_root = self._transport.rank == 0
        here = [o for o in operations if is_root or not o.at_root]
        made = [t for o in here for t in o.outputs if t in self._users]
        graphs, gate = self._program.graphs, self._order.gate
        values = emit(here, known, made, graphs, gate, checks)
        known.update(zip(made, values, strict=True))

    def _access_variables(
        self, operations: Sequence[Operation], place: Place
    ) -> None:
        """Read or write a tower's copies of variables, on its device."""
        if not operations:
            return
        # Whatever is written is the same for all micro-batches.
        scope, *_ = place.parts
        made = [t for o in operations for t in o.outputs if t in self._users]
        with tf.device(place.device):
            values = emit(
                operations, scope, made, self._program.graphs, self._order.gate
            )
        place.shared.update(zip(made, values, strict=True))

    def _call_of(self, operations: Sequence[Operation]) -> _Call | None:
        """Return a call of a function of operations; None: there are none."""
        if not operations:
            return None
        body = self._closure(operations)
        function = self._function(body) or GraphFunction(
            graph_of(body, self._program.graphs), "called"
        )
        return _Call(body, function)

    def _with_variables(
        self,
        call: _Call,
        reads: Sequence[Operation],
        writes: Sequence[Operation],
        places: Sequence[Place],
    ) -> tuple[_Call, Sequence[Operation], Sequence[Operation]]:
        """Let a function that XLA compiles read and write variables itself.

        XLA's kernel reads and assigns all of them at once, and in place, where
        the graph would have an operation for each.

        Returns:
            The call, and the reads that remain before it and the writes after.
        """
        body = call.body
        sections = {_section(operation) for operation in body.operations}
        after: Sequence[Operation] = []
        if all(self._can_be_compiled(o, places) for o in writes):
            sections |= {_section(operation) for operation in writes}
        else:
            # They keep their order.
            after, writes = writes, after

        def is_used(tensor: Tensor) -> bool:
            return not self._users.get(tensor, set()) <= sections

        before = []
        for operation in reads:
            if any(map(is_used, operation.outputs)) or (
                not self._can_be_compiled(operation, places)
            ):
                before.append(operation)
        reads = [operation for operation in reads if operation not in before]
        if not reads and not writes:
            return call, before, after
        made = [*body.outputs, *(t for o in writes for t in o.outputs)]
        whole = self._closure(
            [*reads, *body.operations, *writes],
            outputs=[tensor for tensor in made if is_used(tensor)],
        )
        graphs = self._program.graphs

        def run(known: dict[Tensor, Any]) -> list[Any]:
            values = [t for o in reads for t in o.outputs]
            known |= zip(
                values, emit(reads, known, values, graphs), strict=True
            )
            results = call.function([value_of(t, known) for t in body.inputs])
            known |= zip(body.outputs, results, strict=True)
            return emit(writes, known, whole.outputs, graphs)

        function = GraphFunction(graph_of_inputs(whole.inputs, run), "xla")
        compiled = _Call(whole, function, self._order.gate)
        return compiled, before, after

    def _can_be_compiled(
        self, operation: Operation, places: Sequence[Place]
    ) -> bool:
        """Whether XLA can do what towers do with their variables."""
        if operation.type not in _COMPILED:
            return False
        for tensor in operation.inputs:
            if tensor.handle is None:
                continue
            dtype, shape = type_of_content(tensor)
            if dtype in _NOT_COMPILED or not shape.is_fully_defined():
                return False
            # XLA uses no variables of other devices, as the first copy may be.
            for place in places:
                handle = value_of(tensor, place.parts[0])
                device = self._devices_of_handles.get(id(handle), "")
                if not same_device(device, place.device):
                    return False
        return True

    def _compute_on_towers(
        self,
        call: _Call | None,
        places: Sequence[Place],
        once: bool = False,
    ) -> None:
        """Call a function for each tower's micro-batches.

        Args:
            call: the call; None: nothing is computed.
            places: the towers, or the columns of all towers.
            once: whether all micro-batches of a tower share the results.
        """
        if call is None:
            return
        function = call.function
        inputs, outputs = call.body.inputs, call.body.outputs
        for place in places:
            made: list[Any] = []
            if once:
                first, *_ = place.parts
                with tf.device(place.device):
                    values = function([value_of(t, first) for t in inputs])
                place.shared.update(with_shapes(outputs, values))
                continue
            for part in place.parts:
                # One micro-batch frees its memory before the next one begins.
                after = [*call.gate, *made]
                with tf.device(place.device), tf.control_dependencies(after):
                    given = [value_of(t, part) for t in inputs]
                    if made:
                        given = [_after_dependencies(value) for value in given]
                    part.update(with_shapes(outputs, function(given)))
                    made = [
                        place.add(t, part[t]) if t in self._summed else part[t]
                        for t in outputs
                    ]

    def _function(self, body: Function) -> GraphFunction | None:
        """Return a function that is called; None: XLA cannot compile it."""
        graph = graph_of(body, self._program.graphs)
        mode = self._mode
        if mode == "called" and self._is_small:
            mode = "inlined"
        function = GraphFunction(graph, mode)
        if mode != "xla":
            return function
        try:
            function.check_xla(
                self._devices[0],
                [
                    functools.partial(batch.inputs_of, body.inputs)
                    for batch in self._assumed
                ],
            )
        except Uncompilable as error:
            sources = {o.name: o.source for o in body.operations}
            name = error.node
            # The name has a suffix if several operations share it.
            source = sources.get(name) or sources.get(name.rpartition("_")[0])
            self.not_compiled.append((str(error), source))
            return None
        self.compiled += 1
        return function

    def _exchange(
        self,
        exchanges: Sequence[Exchange],
        known: MutableMapping[Tensor, Any],
        towers: Sequence[Place],
        columns: Sequence[MutableMapping[Tensor, Any]],
        cells: Sequence[Sequence[Place]],
    ) -> None:
        """Exchange tensors, and add the results to their tensors."""
        of_towers = [e for e in exchanges if e.over == "towers"]
        shared = [e for e in of_towers if not e.given.on_columns]
        if shared:
            self._exchange_over_towers(shared, known, towers)
        own = [e for e in of_towers if e.given.on_columns]
        for column, places in zip(
            columns, zip(*cells, strict=True), strict=True
        ):
            if own:
                self._exchange_over_towers(own, column, places)
        of_columns = [e for e in exchanges if e.over == "columns"]
        for exchange in of_columns:
            if not exchange.given.on_towers:
                self._exchange_over_columns(
                    exchange, self._mesh[0], columns, known, columns
                )
                continue
            for row, tower, of_row in zip(
                self._mesh, towers, cells, strict=True
            ):
                number = len(tower.parts) if exchange.given.of_batch else 1
                for k in range(number):
                    of_batch = exchange.result.of_batch
                    self._exchange_over_columns(
                        exchange,
                        row,
                        [place.parts[k] for place in of_row],
                        tower.parts[k] if of_batch else tower.shared,
                        [p.parts[k] if of_batch else p.shared for p in of_row],
                    )

    def _exchange_over_columns(
        self,
        exchange: Exchange,
        devices: Sequence[str],
        given: Sequence[Mapping[Tensor, Any]],
        to_all: MutableMapping[Tensor, Any],
        to_each: Sequence[MutableMapping[Tensor, Any]],
    ) -> None:
        """Exchange a tensor of the columns of a tower.

        Args:
            exchange: the exchange.
            devices: the M columns' devices.
            given: the tensors of each column.
            to_all: gets a result that all columns share.
            to_each: get the results that columns have of their own.
        """
        values = [value_of(exchange.given, scope) for scope in given]
        rows: list[Sequence[int]] = []
        if exchange.kind == "scatter":
            count: Any = exchange.result.shape[exchange.axis]
            rows = [(k * count, count) for k in range(len(devices))]
        with tf.device(devices[0]):
            (result,) = exchange_tensors(
                [exchange], [values], [rows], devices, SingleProcess()
            )
        if not exchange.is_own:
            to_all.update(with_shapes([exchange.result], [result]))
            return
        for scope, value in zip(to_each, result, strict=True):
            scope.update(with_shapes([exchange.result], [value]))

    def _exchange_over_towers(
        self,
        exchanges: Sequence[Exchange],
        known: MutableMapping[Tensor, Any],
        towers: Sequence[Place],
    ) -> None:
        """Exchange tensors of towers, or of a column of them."""
        transport = self._transport
        devices = [tower.device for tower in towers]
        parts = [part for tower in towers for part in tower.parts]

        def given(exchange: Exchange) -> list[Any]:
            """Return what towers, or micro-batches, exchange."""
            tensor = exchange.given
            source = tensor.operation
            # Only the first process has it.
            if source is not None and source.at_root and transport.rank != 0:
                return []
            if tensor.of_batch and exchange.kind in ("sum", "scatter"):
                return [tower.sum(tensor) for tower in towers]
            if tensor.of_batch or not tensor.on_towers:
                return [value_of(tensor, part) for part in parts]
            return [value_of(tensor, tower.parts[0]) for tower in towers]

        def rows_of(exchange: Exchange) -> list[list[Any]]:
            """Return which rows of the result the towers, or parts, get."""
            differ = exchange.result.of_batch
            takers = parts if differ else [tower.parts[0] for tower in towers]
            rows = exchange.rows or ()
            return [[value_of(t, taker) for t in rows] for taker in takers]

        rows = list(map(rows_of, exchanges))
        with tf.device(devices[0]):
            results = self._order.exchange(
                list(map(given, exchanges)),
                lambda values: exchange_tensors(
                    exchanges, values, rows, devices, transport
                ),
            )
        for exchange, result in zip(exchanges, results, strict=True):
            if exchange.result.on_towers:
                differ = exchange.result.of_batch
                takers = parts if differ else [t.shared for t in towers]
                for tensors, value in zip(takers, result, strict=True):
                    tensors.update(with_shapes([exchange.result], [value]))
            else:
                known.update(with_shapes([exchange.result], [result]))


def _section(operation: Operation, number: int = 1) -> tuple[Any, ...]:
    """Return the section of a level that an operation belongs to.

    Args:
        operation: the operation.
        number: the number of micro-batches of a tower.
    """
    # What micro-batches share is a section of its own.
    differs = number > 1 and _is_of_batch(operation)
    return operation.level, operation.phase, differs, operation.on_columns


def _is_of_batch(operation: Operation) -> bool:
    """Whether what an operation does differs between micro-batches."""
    tensors = (*operation.inputs, *operation.outputs)
    return any(tensor.on_towers and tensor.of_batch for tensor in tensors)


def _after_dependencies(tensor: Any) -> Any:
    """Return a tensor after the control dependencies of this block."""
    # TensorFlow would not recognize a copy of a handle as a constant.
    if tensor.dtype in (tf.resource, tf.variant):
        return tensor
    return tf.identity(tensor)


def _summed(program: Program) -> set[Tensor]:
    """The towers' tensors that are summed over all towers."""
    kinds = ("sum", "scatter")
    exchanges = [e for e in program.exchanges if e.over == "towers"]
    tensors = [e.given for e in exchanges if e.kind in kinds]
    for update in program.updates:
        tensors += [t for t in update.given if t not in update.rows]
    return {tensor for tensor in tensors if tensor.on_towers}
