"""The step of one of several processes that exchange nothing within a step.

Each process has only its own rows. Results that need the rows of the rest, such
as metrics and batch statistics, are computed as if its own rows were the whole
batch. Gradients that are sums over rows are still exact terms of the global
gradient, including its normalization. Without any rows, a process writes
nothing that depends on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_towers.partition.builder import Builder
from keras_towers.partition.program import (
    Exchange,
    Inputs,
    Operation,
    Program,
    Tensor,
    prune,
)

_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


@dataclasses.dataclass(frozen=True, eq=False)
class LocalStep:
    """The step of one process.

    Attributes:
        program: the program. Its inputs refer to the process's own rows.
        joint_inputs: its inputs, whose ``start``, ``total`` and ``is_first``
            refer to the rows of all processes.
        parts: the names of the groups of gradients that are terms of the global
            gradients. The remaining ones are those of the process's own rows.
        shared: the gradients among these parts that do not depend on rows, and
            are the same for all processes.
    """

    program: Program
    joint_inputs: Inputs
    parts: frozenset[str]
    shared: frozenset[Tensor]


def write_only_rows(program: Program) -> Program:
    """Let a process without rows write nothing that depends on them.

    For example a BatchNormalization keeps its statistics. A process asks for
    this whose variables need not be those of the others.
    """
    inputs = program.inputs
    has_rows = Tensor(tf.bool, tf.TensorShape(()))
    # Of one exchange after another, too.
    exchanged: dict[Tensor, Tensor] = {}
    for exchange in program.exchanges:
        given_here = exchange.given
        exchanged[exchange.result] = exchanged.get(given_here, given_here)
    of_rows = {inputs.start, inputs.total, inputs.is_first}
    of_rows.update(t for t in inputs.of_graph if "parts" in t.axes)
    builder = Builder()
    for operation in program.operations:
        if any(exchanged.get(t, t) in of_rows for t in operation.inputs):
            of_rows.update(operation.outputs)
            if operation.type in _WRITES:
                builder.of_update = operation.of_update
                operation = _only_if(has_rows, operation, builder)
        builder.operations.append(operation)
    return dataclasses.replace(
        program,
        operations=builder.operations,
        inputs=dataclasses.replace(inputs, has_rows=has_rows),
    )


def to_local_step(
    program: Program, gradients: Mapping[str, Sequence[Tensor]]
) -> LocalStep:
    """Convert a program to the step of one process.

    Args:
        program: the program.
        gradients: the results that are gradients, in groups with names.
    """
    program = write_only_rows(program)
    inputs = program.inputs
    joint_inputs = dataclasses.replace(
        inputs,
        start=dataclasses.replace(inputs.start),
        total=dataclasses.replace(inputs.total),
        is_first=dataclasses.replace(inputs.is_first),
    )
    # Tensors of the global batch, by their counterparts of the local one.
    whole = {
        inputs.start: joint_inputs.start,
        inputs.total: joint_inputs.total,
        inputs.is_first: joint_inputs.is_first,
    }
    by_result = {e.result: e for e in program.exchanges}
    exchanges = list(program.exchanges)
    # Tensors that need all processes' rows.
    of_others: set[Tensor] = set()
    operations: list[Operation] = []

    def exchanged(result: Tensor) -> None:
        exchange = by_result.pop(result, None)
        if exchange is None:
            return
        part = exchange.given
        if exchange.kind != "first" or part in of_others:
            of_others.add(result)
        elif part in whole:
            whole[result] = dataclasses.replace(result)
            exchanges.append(Exchange("first", whole[part], whole[result]))

    for operation in program.operations:
        for tensor in operation.inputs:
            exchanged(tensor)
        needs_others = any(t in of_others for t in operation.inputs)
        operands = [whole.get(t, t) for t in operation.inputs]
        if operation.type == "Assert" and not needs_others:
            # It is about the batch of one device.
            operation = _with_inputs(operation, operands)
        operations.append(operation)
        if needs_others:
            of_others.update(operation.outputs)
            continue
        if not operation.has_effect and operands != [*operation.inputs]:
            copy = _with_inputs(operation, operands)
            whole.update(zip(operation.outputs, copy.outputs, strict=True))
            operations.append(copy)
    terms = {e.result: e for e in program.exchanges if e.kind != "first"}
    parts: set[str] = set()
    # The results of the local step, by those of the program.
    results: dict[Tensor, Tensor] = {}
    for name, of_group in gradients.items():
        given = [terms[t].given if t in terms else t for t in of_group]
        for tensor in given:
            exchanged(tensor)
        if not of_others.isdisjoint(given):
            continue
        parts.add(name)
        for result, part in zip(of_group, given, strict=True):
            results[result] = whole.get(part, part)
            if result in terms:
                results[result] = dataclasses.replace(result)
                exchanges.append(
                    dataclasses.replace(
                        terms[result],
                        given=whole.get(part, part),
                        result=results[result],
                    )
                )
    shared = {own for t, own in results.items() if t not in terms}
    ends = [results.get(tensor, tensor) for tensor in program.results]
    left, needed_exchanges = prune(operations, exchanges, ends)
    of_process = dataclasses.replace(
        program, operations=left, exchanges=needed_exchanges, results=ends
    )
    return LocalStep(
        of_process, joint_inputs, frozenset(parts), frozenset(shared)
    )


def _with_inputs(operation: Operation, inputs: list[Tensor]) -> Operation:
    """Return a copy of an operation with other inputs and new outputs."""
    outputs: list[Tensor] = []
    copy = dataclasses.replace(operation, inputs=inputs, outputs=outputs)
    for tensor in operation.outputs:
        outputs.append(dataclasses.replace(tensor, operation=copy))
    return copy


def _only_if(
    condition: Tensor, operation: Operation, builder: Builder
) -> Operation:
    """Return a conditional copy of a write to a variable."""
    handle, value = operation.inputs
    if operation.type == "AssignVariableOp":
        # The value of the variable at the time of the write.
        (before,) = builder.add(
            "ReadVariableOp",
            [handle],
            {"dtype": value.dtype},
            [(value.dtype, value.shape)],
            operation.level,
        )
    else:
        before = builder.op("ZerosLike", [value], value.shape)
    chosen = builder.op("SelectV2", [condition, value, before], value.shape)
    return _with_inputs(operation, [handle, chosen])
