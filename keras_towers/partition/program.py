"""A step over towers as data: operations, and exchanges between them.

What does not belong to a tower is computed once, for all. Every exchange ends a
level: what needs its result belongs to the next one. A level is therefore what
is computed once, then one function that each tower calls, then the exchanges
that follow from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from keras_towers import compat


@dataclasses.dataclass(eq=False, slots=True)
class Tensor:
    """A tensor of a program.

    Attributes:
        dtype: its dtype.
        shape: what is known of its shape, on a tower that of its rows.
        on_towers: whether each tower has its own.
        level: the number of exchanges that come before it.
        operation: the operation whose output it is; None: it is an input of the
            program, or the result of an exchange.
        index: which of the operation's outputs it is.
        handle: of what variable it is a handle, as TensorFlow says it.
    """

    dtype: Any
    shape: tf.TensorShape
    on_towers: bool
    level: int = 0
    operation: Operation | None = None
    index: int = 0
    handle: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """An operation of a program.

    Attributes:
        type: its type.
        inputs: its N inputs.
        attributes: its attributes, as in a graph.
        outputs: its outputs.
        level: the number of exchanges that come before it.
        on_towers: whether each tower does it.
        has_effect: whether it is done even if nobody needs its outputs.
        is_repeated: whether every function that needs it has its own, as a
            constant, from which TensorFlow infers shapes.
        functions: functions that it calls, by the attributes that name them,
            one or several.
        source: the operation of the trace that it stands for, if for one.
        at_root: whether of several processes only the first does it.
        name: that of the operation of the trace because of which it is done:
            TensorFlow's errors show it. It may be that of others, too.
    """

    type: str
    inputs: Sequence[Tensor]
    attributes: Mapping[str, Any]
    outputs: list[Tensor]
    level: int
    on_towers: bool
    has_effect: bool = False
    is_repeated: bool = False
    functions: Mapping[str, Function | Sequence[Function]] = dataclasses.field(
        default_factory=dict
    )
    source: Any = None
    at_root: bool = False
    name: str = ""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Exchange:
    """What towers exchange.

    Attributes:
        kind: ``sum``: the sum of all; ``gather``: all joined along an axis, in
            the order of the towers; ``first``: that of the first tower, as all
            have the same; ``before``: for each tower the sum of those before;
            ``root``: what the first of several processes has computed once.
        given: what each tower gives, or what is computed once.
        result: what comes of it.
        axis: the axis along which they are joined.
        size: the size of that axis of the result, in symbols; None: each tower
            gives as much.
    """

    kind: Literal["sum", "gather", "first", "before", "root"]
    given: Tensor
    result: Tensor
    axis: int = 0
    size: Any = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A function that operations call: the body of a loop, or a branch.

    Attributes:
        inputs: its N inputs.
        outputs: its outputs, among them maybe inputs.
        operations: its operations, in their order.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    operations: Sequence[Operation]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Update:
    """An optimizer updates its weights: what comes behind finds them changed.

    Attributes:
        name: that of the operation of the trace that stands for it.
        given: what it is given, such as the parts of a gradient that towers
            have, which it sums.
        level: the level at whose end it happens.
        rows: those of ``given`` that are rows of towers, which it joins.
    """

    name: str
    given: Sequence[Tensor]
    level: int
    rows: Sequence[Tensor] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """What a program is given.

    Attributes:
        of_graph: for each of the N inputs of the graph: a tensor of the towers,
            their rows, or one for all.
        start: of each tower: the number of examples of those before it.
        total: the number of examples of all.
        is_first: of each tower: whether it is the first.
        sizes: other sizes of rows, which all have: that of axis a of input k by
            ``k.a``.
        copies: for some of the inputs, which are handles of variables, by their
            numbers: of each tower: the handle of its own copy. The common
            handle is that of the first tower's.
    """

    of_graph: Sequence[Tensor]
    start: Tensor
    total: Tensor
    is_first: Tensor
    sizes: Mapping[str, Tensor]
    copies: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A step over towers.

    Attributes:
        inputs: what it is given.
        operations: all operations that are needed, in their order.
        exchanges: all exchanges that are needed.
        updates: all updates, in their order.
        results: what was asked for, in the order in which it was.
        graphs: the graphs whose functions are called as they are.
        once: the operations of the trace that take rows, but are computed
            once, for all towers.
        has_gathered: whether rows are gathered instead of larger sums, which
            is slow if there are many more than was expected.
    """

    inputs: Inputs
    operations: Sequence[Operation]
    exchanges: Sequence[Exchange]
    updates: Sequence[Update]
    results: Sequence[Tensor]
    graphs: Sequence[Any]
    once: Sequence[Any]
    has_gathered: bool = False

    @property
    def levels(self) -> int:
        """The number of levels."""
        last = [operation.level for operation in self.operations]
        last += [exchange.given.level for exchange in self.exchanges]
        last += [update.level for update in self.updates]
        return 1 + max(last, default=0)


def needed(
    operations: Sequence[Operation],
    exchanges: Iterable[Exchange],
    results: Iterable[Tensor],
) -> tuple[list[Operation], list[Exchange]]:
    """Leave out the operations and exchanges that nobody needs."""
    exchanged = {exchange.result: exchange for exchange in exchanges}
    waiting = [*results]
    waiting += [t for o in operations if o.has_effect for t in o.inputs]
    kept = {id(o) for o in operations if o.has_effect}
    seen: set[Tensor] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        if tensor in exchanged:
            waiting.append(exchanged[tensor].given)
        elif tensor.operation is not None:
            kept.add(id(tensor.operation))
            waiting += tensor.operation.inputs
    return (
        [o for o in operations if id(o) in kept],
        [exchange for t, exchange in exchanged.items() if t in seen],
    )


def delayed(
    operations: Sequence[Operation],
    exchanges: Iterable[Exchange],
    updates: Iterable[Update],
    results: Iterable[Tensor],
) -> None:
    """Move operations of towers to the levels that need them.

    The backward pass begins with what it makes of values of the forward pass,
    such as their distance from a mean. Made where these are, it would be kept
    for each layer beside them.

    Args:
        operations: the operations, in their order.
        exchanges: the exchanges, which stay where they are.
        updates: the updates, whose gradients are there as soon as possible.
        results: what was asked for.
    """
    uses: dict[Tensor, set[int]] = {}

    def use(tensors: Iterable[Tensor], levels: Iterable[int]) -> None:
        for tensor in tensors:
            uses.setdefault(tensor, set()).update(levels)

    for exchange in exchanges:
        use([exchange.given], [exchange.given.level])
    for tensor in [*results, *(t for u in updates for t in u.given)]:
        use([tensor], [tensor.level])
    for operation in reversed(operations):
        levels = {n for t in operation.outputs for n in uses.get(t, ())}
        if operation.is_repeated:
            use(operation.inputs, levels)
            continue
        level = min(levels, default=operation.level)
        if level > operation.level and _may_wait(operation, level, uses):
            operation.level = level
            for tensor in operation.outputs:
                tensor.level = level
        use(operation.inputs, [operation.level])


def _may_wait(
    operation: Operation, level: int, uses: dict[Tensor, set[int]]
) -> bool:
    """Whether an operation may be done later without keeping more for it."""
    definition = compat.op_definition(operation.type)
    if (
        not operation.on_towers
        or operation.has_effect
        or operation.functions
        or definition is None
        or definition.is_stateful
    ):
        return False
    return all(
        not tensor.on_towers
        or (tensor.operation is not None and tensor.operation.is_repeated)
        or max(uses.get(tensor, ()), default=-1) >= level
        for tensor in operation.inputs
    )
