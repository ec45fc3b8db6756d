"""The step of one of several processes that exchange nothing within a step.

``fit/step/step_layout.py`` makes such a step for processes that only exchange
gradients. Each process has only its own rows. Results that need the rows of all
processes, such as metrics and batch statistics, are computed as if its own rows
were the whole batch. Gradients that are sums over rows are still exact terms of
the global gradient, with its normalization. A process without rows writes
nothing that depends on rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.builder import Builder
from keras_towers.partition.memory_estimate import made_by, used_by
from keras_towers.partition.program import (
    Exchange,
    Inputs,
    Operation,
    Program,
    Tensor,
    prune,
)

_POSITIONS = ("start", "total", "is_first")
_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


@dataclasses.dataclass(frozen=True, eq=False)
class LocalStep:
    """The step of one process that exchanges nothing within the step.

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
    """Make a process without rows skip the writes that depend on rows.

    For example, a BatchNormalization then keeps its statistics. A process asks
    for this if its variables may differ from those of the others.
    """
    inputs = program.inputs
    has_rows = Tensor(tf.bool, tf.TensorShape(()))
    rows = [
        tensor for tensor in inputs.of_graph if "micro_batches" in tensor.axes
    ]
    rows += [inputs.start, inputs.total, inputs.is_first]
    of_rows = _following(program, rows)
    builder = Builder()
    for operation in program.operations:
        depends = not of_rows.isdisjoint(operation.inputs)
        if depends and operation.type in _WRITES:
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
    own = {name: getattr(program.inputs, name) for name in _POSITIONS}
    new = {name: dataclasses.replace(tensor) for name, tensor in own.items()}
    # Tensors of the global batch, by their counterparts of the local one.
    whole = {own[name]: new[name] for name in _POSITIONS}
    summed = {e.result: e for e in program.exchanges if e.kind != "first"}
    of_others = _following(program, summed)
    events = [*_of_both_batches(program, whole, of_others)]
    # The results of the local step, by those of the program.
    results: dict[Tensor, Tensor] = {}
    parts: set[str] = set()
    for name, of_group in gradients.items():
        terms = [summed[t].given if t in summed else t for t in of_group]
        if not of_others.isdisjoint(terms):
            continue
        parts.add(name)
        for result, term in zip(of_group, terms, strict=True):
            results[result] = whole.get(term, term)
            if result in summed:
                events.append(_with_inputs(summed[result], [results[result]]))
                (results[result],) = made_by(events[-1])
    ends = [results.get(tensor, tensor) for tensor in program.results]
    operations, exchanges = prune(
        [event for event in events if isinstance(event, Operation)],
        [event for event in events if isinstance(event, Exchange)],
        ends,
    )
    return LocalStep(
        dataclasses.replace(
            program, operations=operations, exchanges=exchanges, results=ends
        ),
        dataclasses.replace(program.inputs, **new),
        frozenset(parts),
        frozenset(own for t, own in results.items() if t not in summed),
    )


def _of_both_batches(
    program: Program, whole: dict[Tensor, Tensor], of_others: set[Tensor]
) -> Iterator[Operation | Exchange]:
    """Yield each event of a program, for the own batch and for the global one.

    Args:
        program: the program.
        whole: tensors of the global batch, by their counterparts of the local
            one; gets all others.
        of_others: tensors that need all processes' rows.
    """
    for event in _in_order(program):
        used, made = [*used_by(event)], made_by(event)
        operands = [whole.get(tensor, tensor) for tensor in used]
        if operands == used or not of_others.isdisjoint((*used, *made)):
            yield event
            continue
        copy = _with_inputs(event, operands)
        is_check = isinstance(event, Operation) and event.type == "Assert"
        if not is_check:
            yield event
        # A check is about the batch of one device.
        if is_check or isinstance(event, Exchange) or not event.has_effect:
            yield copy
            whole |= zip(made, made_by(copy), strict=True)


def _following(program: Program, tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return tensors, and everything that is computed from them."""
    following = set(tensors)
    for event in _in_order(program):
        if not following.isdisjoint(used_by(event)):
            following.update(made_by(event))
    return following


def _in_order(program: Program) -> Iterator[Operation | Exchange]:
    """Yield operations and exchanges, each before those that use its result."""
    left = {exchange.result: exchange for exchange in program.exchanges}

    def needed(tensors: Iterable[Tensor]) -> Iterator[Exchange]:
        for exchange in [left.pop(t) for t in tensors if t in left]:
            yield from needed(exchange.used)
            yield exchange

    for operation in program.operations:
        yield from needed(operation.inputs)
        yield operation
    yield from needed([*left])


def _with_inputs(event: Operation | Exchange, inputs: Sequence[Tensor]) -> Any:
    """Return a copy of an operation or an exchange, with new results."""
    if isinstance(event, Exchange):
        result = dataclasses.replace(event.result)
        return dataclasses.replace(event, given=inputs[0], result=result)
    outputs: list[Tensor] = []
    copy = dataclasses.replace(event, inputs=inputs, outputs=outputs)
    for tensor in event.outputs:
        outputs.append(dataclasses.replace(tensor, operation=copy))
    return copy


def _only_if(
    condition: Tensor, operation: Operation, builder: Builder
) -> Operation:
    """Return a copy of a write to a variable that depends on a condition."""
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
