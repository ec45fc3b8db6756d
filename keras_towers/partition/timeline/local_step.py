"""The step of one of several processes that exchange nothing within a step.

``step_layout.py`` makes such a step for processes that only exchange
gradients. Each process has only its own rows. Results that need the rows of all
processes, such as metrics and batch statistics, are computed as if its own rows
were the whole batch. Gradients that are sums over rows are still exact terms of
the global gradient, with its normalization. A process without rows writes
nothing that depends on rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import (
    Event,
    Inputs,
    Operation,
    Program,
    Tensor,
    mapped_edges,
    prune,
    with_inputs,
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
    before = {**program.before}
    written: dict[Event, Event] = {}
    for event in program.events:
        if (
            isinstance(event, Operation)
            and event.type in _WRITES
            and not of_rows.isdisjoint(event.inputs)
        ):
            builder.of_update = event.of_update
            first = len(builder.events)
            written[event] = _only_if(has_rows, event, builder)
            # It reads the variable at the time of the write.
            added = dict.fromkeys(builder.events[first:], before[event])
            before |= added
            event = written[event]
        builder.events.append(event)
    return dataclasses.replace(
        program,
        events=builder.events,
        before=mapped_edges(before, lambda e: [written.get(e, e)]),
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
    both: dict[Event, list[Event]] = {}
    for event in program.events:
        both[event] = _of_both_batches(event, whole, of_others)
    events = [*itertools.chain(*both.values())]
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
                given = [results[result], *summed[result].used[1:]]
                events.append(with_inputs(summed[result], given))
                (results[result],) = events[-1].made
    ends = [results.get(tensor, tensor) for tensor in program.results]
    kept = {*prune(events, ends)}
    events = [event for event in events if event in kept]
    before = mapped_edges(
        program.before, lambda event: [e for e in both[event] if e in kept]
    )
    return LocalStep(
        dataclasses.replace(
            program, events=events, before=before, results=ends
        ),
        dataclasses.replace(program.inputs, **new),
        frozenset(parts),
        frozenset(own for t, own in results.items() if t not in summed),
    )


def _of_both_batches(
    event: Event, whole: dict[Tensor, Tensor], of_others: set[Tensor]
) -> list[Event]:
    """Return an event for the own batch, and for the global one.

    Args:
        event: the event.
        whole: tensors of the global batch, by their counterparts of the local
            one; gets those that the event makes.
        of_others: tensors that need all processes' rows.
    """
    used = [*event.used]
    operands = [whole.get(tensor, tensor) for tensor in used]
    if operands == used or not of_others.isdisjoint((*used, *event.made)):
        return [event]
    is_check, acts = False, False
    if isinstance(event, Operation):
        is_check, acts = event.type == "Assert", event.has_effect
    if acts and not is_check:
        return [event]
    copy = with_inputs(event, operands)
    whole |= zip(event.made, copy.made, strict=True)
    # A check is about the batch of one device.
    return [copy] if is_check else [event, copy]


def _following(program: Program, tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return tensors, and everything that is computed from them."""
    following = set(tensors)
    for event in program.events:
        if not following.isdisjoint(event.used):
            following.update(event.made)
    return following


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
        )
    else:
        before = builder.op("ZerosLike", [value], value.shape)
    chosen = builder.op("SelectV2", [condition, value, before], value.shape)
    return with_inputs(operation, [handle, chosen])
