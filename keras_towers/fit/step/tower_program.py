"""A program as the towers run it: a function per level."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.places import Places
from keras_towers.fit.step.exchanges import GradientExchange
from keras_towers.fit.step.graph_function import CallMode
from keras_towers.fit.step.pace import Pace
from keras_towers.fit.step.program_inputs import StepInputs
from keras_towers.fit.step.tower_exchanges import TowerExchanges
from keras_towers.fit.step.tower_functions import (
    FunctionCall,
    TowerFunctions,
    is_of_batch,
)
from keras_towers.fit.step.tower_tensors import (
    TowerTensors,
    value_of,
    with_shapes,
)
from keras_towers.fit.step_order import StepOrder
from keras_towers.partition.emission import emit
from keras_towers.partition.program import (
    Operation,
    Phase,
    Program,
    Tensor,
)
from keras_towers.partition.stages import Stage, Stages


class TowerProgram:
    """Adds a program to the current graph, for the towers of this process.

    Args:
        program: the program.
        mode: how towers call their functions.
        places: where it computes, and with whom. A tower computes its
            micro-batches one after another.
        order: orders the exchanges between processes.
        gradients: adds gradients up; None: as anything else is.

    Attributes:
        functions: what towers call.
        xla: what XLA compiles, in the mode ``xla``.
    """

    def __init__(
        self,
        program: Program,
        mode: CallMode,
        places: Places,
        order: StepOrder,
        gradients: GradientExchange | None = None,
    ):
        self._program = program
        self._mesh, self._transport = places.mesh, places.ranks.step
        # Where towers compute what all of their columns share.
        self._devices: list[str] = [row[0] for row in places.mesh]
        self._order = order
        self._micro_batches = places.parts
        self.xla = Stages(program, self._devices[0])
        # By level: what is computed once, or once for each column.
        self._once: dict[tuple[int, bool], Sequence[Stage]] = {}
        for level in range(program.levels):
            for on_columns in (False, True):
                here = [
                    o
                    for o in program.of_level(level)
                    if not o.on_towers and o.on_columns == on_columns
                ]
                self._once[level, on_columns] = (
                    self.xla.of(here) if mode == "xla" else [Stage(single=here)]
                )
        self.functions = TowerFunctions(
            program,
            mode,
            self._devices,
            self.xla,
            self._once,
            order,
            places.parts,
        )
        self._exchanges = TowerExchanges(places, order, gradients)
        self._summed = _summed(program)

    def add_to_graph(self, inputs: StepInputs) -> list[Any]:
        """Add the program to this graph; return its results.

        Args:
            inputs: what the inputs of the program get.
        """
        program, devices = self._program, self._devices
        known, parts = dict(inputs.common), inputs.parts
        number = self._micro_batches
        towers = [
            TowerTensors(
                device,
                [
                    [part, known]
                    for part in parts[k * number : (k + 1) * number]
                ],
            )
            for k, device in enumerate(devices)
        ]
        columns: list[ChainMap[Tensor, Any]] = [
            ChainMap(dict(own), known) for own in inputs.of_columns
        ]
        cells = [
            _cells_of_tower(row, of_row, tower, columns)
            for row, tower, of_row in zip(
                self._mesh, towers, inputs.of_cells, strict=False
            )
        ]
        of_all_cells = [cell for row in cells for cell in row]
        pace = Pace(program)
        for level in range(program.levels):
            checks: list[Any] = []
            self._compute_stages(level, known, devices[0], False, checks)
            for device, column in zip(self._mesh[0], columns, strict=False):
                self._compute_stages(level, column, device, True, checks)
            operations = program.of_level(level)
            for on_columns, owners in ((False, towers), (True, of_all_cells)):
                here = [o for o in operations if o.on_columns == on_columns]
                pace.note_computed(self._run_level(here, owners))
            exchanges = [e for e in program.exchanges if e.level == level]
            if exchanges:
                with pace.before_exchanges(exchanges):
                    exchanged = self._exchanges.add_to_graph(
                        exchanges, known, towers, columns, cells
                    )
                pace.note_exchanged(exchanged)
            pace.end_level()
            # A step whose assertion fails updates nothing.
            with tf.device(devices[0]):
                self._order.assert_first(checks)
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
                outputs = self.functions.used(stage.compiled)
                values = self.functions.add_compiled(
                    stage.compiled, known, outputs
                )
                known.update(zip(outputs, values, strict=True))
                self._compute_once(stage.single, known, checks)

    def _run_level(
        self, operations: Sequence[Operation], owners: Sequence[TowerTensors]
    ) -> list[Any]:
        """Add what towers, or all of their columns, do in a level.

        Args:
            operations: the operations.
            owners: the towers, or the columns of all towers.

        Returns:
            What they compute.
        """
        by_phase: dict[Phase, list[Operation]] = {p: [] for p in Phase}
        for operation in operations:
            by_phase[operation.phase].append(operation)
        reads: Sequence[Operation] = by_phase[Phase.READ]
        writes: Sequence[Operation] = by_phase[Phase.WRITE]
        of_parts = by_phase[Phase.TOWERS]
        shared: list[Operation] = []
        if self._micro_batches > 1:
            # What micro-batches share, a tower computes once.
            shared = [o for o in of_parts if not is_of_batch(o)]
            of_parts = [o for o in of_parts if is_of_batch(o)]
        functions = self.functions
        call = functions.call_of(of_parts)
        if call:
            call, reads, writes = functions.with_variables(
                call, reads, writes, owners
            )
        for owner in owners:
            self._access_variables(reads, owner)
        self._compute_on_towers(functions.call_of(shared), owners, once=True)
        computed = self._compute_on_towers(call, owners)
        for owner in owners:
            self._access_variables(writes, owner)
        return computed

    def _compute_once(
        self,
        operations: Sequence[Operation],
        known: MutableMapping[Tensor, Any],
        checks: list[Any],
    ) -> None:
        """Add operations that each process computes, or only the first one."""
        is_root = self._transport.rank == 0
        here = [o for o in operations if is_root or not o.at_root]
        outputs = self.functions.used(here)
        values = self.functions.add_single(
            here, known, outputs, after=self._order.gate, checks=checks
        )
        known.update(zip(outputs, values, strict=True))

    def _access_variables(
        self, operations: Sequence[Operation], owner: TowerTensors
    ) -> None:
        """Read or write a tower's copies of variables, on its device."""
        if not operations:
            return
        # Whatever is written is the same for all micro-batches.
        scope, *_ = owner.parts
        outputs = self.functions.used(operations)
        with tf.device(owner.device):
            values = emit(
                operations,
                scope,
                outputs,
                self._program.graphs,
                self._order.gate,
            )
        owner.shared.update(zip(outputs, values, strict=True))

    def _compute_on_towers(
        self,
        call: FunctionCall | None,
        owners: Sequence[TowerTensors],
        once: bool = False,
    ) -> list[Any]:
        """Call a function for each tower's micro-batches; return the results.

        Args:
            call: the call; None: nothing is computed.
            owners: the towers, or the columns of all towers.
            once: whether all micro-batches of a tower share the results.
        """
        computed: list[Any] = []
        if call is None:
            return computed
        inputs, outputs = call.body.inputs, call.body.outputs
        for owner in owners:
            before: list[Any] = []
            if once:
                first, *_ = owner.parts
                with tf.device(owner.device):
                    values = call([value_of(t, first) for t in inputs])
                owner.shared.update(with_shapes(outputs, values))
                continue
            for part in owner.parts:
                # One micro-batch frees its memory before the next one begins.
                after = [*call.gate, *before]
                with tf.device(owner.device), tf.control_dependencies(after):
                    taken = [value_of(t, part) for t in inputs]
                    if before:
                        taken = [_after_dependencies(value) for value in taken]
                    part.update(with_shapes(outputs, call(taken)))
                    before = [
                        owner.add(t, part[t]) if t in self._summed else part[t]
                        for t in outputs
                    ]
            computed += before
        return computed


def _cells_of_tower(
    devices: Sequence[str],
    of_cells: Sequence[dict[Tensor, Any]],
    tower: TowerTensors,
    columns: Sequence[ChainMap[Tensor, Any]],
) -> list[TowerTensors]:
    """Return the tensors of each column of a tower."""
    return [
        TowerTensors(
            device,
            [[{}, own, *part.maps[:-1], *column.maps] for part in tower.parts],
        )
        for device, own, column in zip(devices, of_cells, columns, strict=True)
    ]


def _after_dependencies(tensor: Any) -> Any:
    """Return a tensor after the control dependencies of this block."""
    # TensorFlow would not recognize a copy of a handle as a constant.
    if tensor.dtype in (tf.resource, tf.variant):
        return tensor
    return tf.identity(tensor)


def _summed(program: Program) -> set[Tensor]:
    """The towers' tensors that are summed over all towers."""
    kinds = ("sum", "scatter")
    exchanges = [e for e in program.exchanges if "towers" in e.over]
    tensors = [e.given for e in exchanges if e.kind in kinds]
    return {tensor for tensor in tensors if tensor.on_towers}
