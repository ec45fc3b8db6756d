"""A program: a step over towers as operations and exchanges between them.

Every exchange ends a level: operations that use its result belong to later
levels. A level has operations that run once, a function that every tower runs,
and at its end exchanges: a round, in ``describe()``. Towers read their copies
of variables before the function, and update them after it. A tower of a
two-dimensional mesh has several devices, the columns of the mesh. Each computes
what differs between columns, and columns exchange, too.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.axes import BATCH, ONCE, Axes
from keras_towers.partition.sizes import Dimension


@dataclasses.dataclass(eq=False, slots=True)
class Tensor:
    """A tensor of a program.

    Attributes:
        dtype: its dtype.
        shape: its shape, as far as it is known; on towers, the local shape.
        axes: the axes along which it varies, as in ``axes``.
        level: its level.
        operation: the operation that computes it; None: it is an input of the
            program, or the result of an exchange.
        index: its index among the outputs of the operation.
        handle: the handle data, if it is the handle of a variable.
        is_fixed: whether it is an input that never changes.
    """

    dtype: tf.DType
    shape: tf.TensorShape
    axes: Axes = ONCE
    level: int = 0
    # Operations show their tensors.
    operation: Operation | None = dataclasses.field(default=None, repr=False)
    index: int = 0
    handle: Any = None
    is_fixed: bool = False


Attributes: TypeAlias = "Mapping[str, Any]"
"""The attributes of an operation, by name."""
ExchangeKind: TypeAlias = Literal[
    "sum", "gather", "scatter", "first", "before", "root"
]


class Phase(enum.IntEnum):
    """A phase of a level; phases follow one another.

    Functions take and return values: variables are read before a function and
    written after it, on their devices. If XLA compiles a function, it may
    compile the reads and writes of its level with it.

    Attributes:
        ONCE: what is computed once for all towers.
        READ: towers read their copies of variables.
        TOWERS: towers compute.
        UPDATE: towers write their copies of variables, and compute what an
            optimizer adds to them, outside of a function: it would keep what
            all updates compute until it returns.
    """

    ONCE = 0
    READ = 1
    TOWERS = 2
    UPDATE = 3


def axes_of(tensors: Iterable[Tensor]) -> Axes:
    """Return the axes along which any of the tensors varies."""
    return ONCE.union(*(tensor.axes for tensor in tensors))


def depends_on_batch(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors are computed from rows of the batch."""
    return "micro_batches" in axes_of(tensors)


def is_pure(operation: Operation) -> bool:
    """Whether an operation is a function of its inputs, and calls no other."""
    definition = compat.op_definition(operation.type)
    return not (
        operation.has_effect
        or operation.functions
        or definition is None
        or definition.is_stateful
    )


def phase_of(
    type_: str, inputs: Sequence[Tensor], of_update: bool = False
) -> Phase:
    """Return the phase in which an operation runs.

    Args:
        type_: its type.
        inputs: its inputs.
        of_update: as in ``Operation``.
    """
    if "towers" not in axes_of(inputs):
        return Phase.ONCE
    # Each micro-batch has its own rows of a batch.
    if of_update and not depends_on_batch(inputs):
        return Phase.UPDATE
    if all(tensor.handle is None for tensor in inputs):
        return Phase.TOWERS
    return Phase.READ if type_ == "ReadVariableOp" else Phase.UPDATE


def level_after(inputs: Sequence[Tensor], phase: Phase, least: int = 0) -> int:
    """Return the earliest level of an operation.

    Args:
        inputs: its inputs.
        phase: the phase in which it runs.
        least: the least of all that are possible.
    """
    levels = [least]
    for tensor in inputs:
        is_after = computed_after(tensor, phase)
        levels.append(tensor.level + 1 if is_after else tensor.level)
    return max(levels)


def computed_after(tensor: Tensor, phase: Phase) -> bool:
    """Whether a tensor of the same level is computed after a phase."""
    return tensor.operation is not None and tensor.operation.phase > phase


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """An operation of a program.

    Attributes:
        type: its type.
        inputs: its N inputs.
        attributes: its attributes, as ``AttrValue``.
        outputs: its outputs.
        level: its level.
        axes: the axes along which it is run, and its outputs vary.
        has_effect: whether it is kept even if its outputs are unused.
        is_repeated: whether every function that uses it adds it again, as it
            does constants, from which TensorFlow infers shapes.
        functions: the functions that it calls, by the attributes that name
            them: one function or several.
        source: the traced operation that it stands for, if any.
        of_update: whether an optimizer updates variables by it, one after
            another.
        device: where it runs, if it is computed once; "": on the first tower.
        name: the name of the traced operation for which it was added, which
            TensorFlow shows in errors. Several operations may share it.
        suffix: what errors are to show after the name.
        after: others that run before it, where it is added together with them.
    """

    type: str
    inputs: Sequence[Tensor]
    attributes: Attributes
    outputs: list[Tensor]
    level: int
    axes: Axes
    has_effect: bool = False
    is_repeated: bool = False
    functions: Mapping[str, Function | Sequence[Function]] = dataclasses.field(
        default_factory=dict
    )
    source: tf.Operation | None = None
    of_update: bool = False
    device: str = ""
    name: str = ""
    suffix: str = ""
    after: Sequence[Operation] = ()

    @property
    def phase(self) -> Phase:
        """The phase of its level in which it runs."""
        return phase_of(self.type, self.inputs, self.of_update)

    @property
    def at_root(self) -> bool:
        """Whether only the first of several processes runs it."""
        return "ranks" in self.axes and "towers" not in self.axes


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Exchange:
    """An exchange between towers.

    Attributes:
        kind: ``sum``: the sum over all towers; ``gather``: a concatenation in
            the order of the towers; ``scatter``: for each tower, its own rows
            of the sum; ``first``: the value of the first tower, as all are the
            same; ``before``: for each tower, the sum over all earlier towers;
            ``root``: the value of the first of several processes.
        given: the tensor that every tower contributes, or one computed once.
        result: the result. That of a ``gather`` may be made on every tower.
        axis: the axis of a concatenation, or of the rows.
        sizes: the global shape, in symbols, with None for the number of towers;
            None: every tower contributes a tensor of the same shape.
        rows: for ``scatter``: for each tower, its first row and its number of
            rows.
        units: if the rows are of a variable in shards, the size of its divided
            axis; None: they are other rows.
        over: the axes that it crosses. Along other axes, there is an exchange
            at each place.
        gradient: the gradient that it sums for an optimizer, by the name of the
            tensor in the trace; "": none.
        least: the earliest level at whose end it takes place.
    """

    kind: ExchangeKind
    given: Tensor
    result: Tensor
    axis: int = 0
    sizes: Sequence[Dimension | None] | None = None
    rows: tuple[Tensor, Tensor] | None = None
    units: int | None = None
    over: Axes = BATCH
    gradient: str = ""
    least: int = 0

    @property
    def level(self) -> int:
        """The level at whose end it takes place."""
        return max(self.given.level, self.least)

    @property
    def crosses_ranks(self) -> bool:
        """Whether ranks send anything to one another."""
        return "ranks" in self.over and self.kind != "first"

    @property
    def is_of_equal_parts(self) -> bool:
        """Whether it joins tensors of the same shape."""
        return self.kind == "gather" and self.sizes is None

    @property
    def is_own(self) -> bool:
        """Whether each participant gets a result of its own."""
        return not self.over.isdisjoint(self.result.axes)

    @property
    def used(self) -> list[Tensor]:
        """The tensors that it uses."""
        return [self.given, *(self.rows or ())]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A function that an operation calls: a body, a condition or a branch.

    Or one that XLA compiles.

    Attributes:
        inputs: its N inputs.
        outputs: its outputs, which may include inputs.
        operations: its operations, in order.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    operations: Sequence[Operation]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ColumnInput:
    """An input that differs between the columns of a mesh.

    Attributes:
        kind: ``handle``: of a column's part of a variable; ``start``: the
            number of rows of earlier columns; ``is_first``: whether it is the
            first column.
        key: the index of the variable among the inputs of the graph; for
            ``start`` the global number of rows.
    """

    kind: Literal["handle", "start", "is_first"]
    key: int = 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """The inputs of a program.

    Attributes:
        of_graph: for each of the N inputs of the graph, a tensor of towers or a
            common one.
        start: for each tower, the number of examples of all earlier towers.
        total: the global number of examples.
        is_first: for each tower, whether it is the first; of its micro-batches
            it is true for the first one.
        is_first_micro_batch: for each micro-batch, whether it is its tower's
            first.
        sizes: further sizes, equal on all towers: the size of axis a of input k
            is named ``k.a``.
        copies: the towers' copies of mirrored inputs, or their shards, by the
            index of the input. The common one is the first tower's copy, or
            stands for the whole.
        shares: for an axis of variables in shards, by its size: for each tower
            the number of its rows, and of those of all earlier towers.
        has_rows: whether there are any examples; None: no operation asks.
        of_columns: what the last inputs of the graph are, which differ between
            the columns of a mesh.
    """

    of_graph: Sequence[Tensor]
    start: Tensor
    total: Tensor
    is_first: Tensor
    is_first_micro_batch: Tensor
    sizes: Mapping[str, Tensor]
    copies: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    shares: Mapping[int, tuple[Tensor, Tensor]] = dataclasses.field(
        default_factory=dict
    )
    has_rows: Tensor | None = None
    of_columns: Sequence[ColumnInput] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The memory and the work of a scheduled program.

    Attributes:
        bytes: the peak bytes of a tower, for an assumed batch.
        shared: the peak bytes of all towers that share memory, while ranks
            exchange.
        rounds: the bytes that ranks exchange at a time, by kind of exchange, at
            several times.
        is_paced: whether a level also waits for the exchanges of the level two
            before it.
        recomputed: the number of operations that run again, because their
            results are not kept.
        work: their work, as a fraction of the work of a step without them.
        saved: the bytes that a tower saves by them.
    """

    bytes: int
    shared: int = 0
    rounds: Sequence[Mapping[str, int]] = ()
    is_paced: bool = False
    recomputed: int = 0
    work: float = 0.0
    saved: int = 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A step over towers: operations, and the exchanges between them.

    Attributes:
        inputs: its inputs.
        operations: its operations, in order.
        exchanges: its exchanges.
        results: its results, in the order in which they were requested.
        graphs: the graphs whose functions are called unchanged.
        computed_once: traced operations that take rows, but are not divided,
            and why.
        values: the values of the traced tensors, by their names.
        replaced_sums: the bytes of the sums in place of which rows are
            gathered, which is slow for batches larger than expected.
        schedule: when it computes what; None: not decided yet.
    """

    inputs: Inputs
    operations: Sequence[Operation]
    exchanges: Sequence[Exchange]
    results: Sequence[Tensor]
    graphs: Sequence[tf.Graph]
    computed_once: Mapping[tf.Operation, str]
    values: Mapping[str, Any]
    replaced_sums: int = 0
    schedule: Schedule | None = None

    @property
    def levels(self) -> int:
        """The number of levels."""
        last = [operation.level for operation in self.operations]
        last += [exchange.level for exchange in self.exchanges]
        return 1 + max(last, default=0)

    def of_level(self, level: int) -> list[Operation]:
        """Return the operations of a level, in order."""
        return [
            operation
            for operation in self.operations
            if operation.level == level and not operation.is_repeated
        ]


def needed_operations(
    function: Function, repeats: Callable[[Operation], bool]
) -> tuple[list[Operation], list[Tensor]]:
    """Return the operations that a function needs, and its captures.

    Args:
        function: the function.
        repeats: whether it repeats an operation from outside, rather than
            capture its output.
    """
    inside = {id(operation) for operation in function.operations}
    seen, waiting = set(function.inputs), list(function.outputs)
    kept: set[int] = set()
    captured: list[Tensor] = []
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        source = tensor.operation
        if source is not None and (id(source) in inside or repeats(source)):
            kept.add(id(source))
            waiting += source.inputs
        else:
            captured.append(tensor)
    return [o for o in function.operations if id(o) in kept], captured


def prune(
    operations: Sequence[Operation],
    exchanges: Iterable[Exchange],
    results: Iterable[Tensor],
) -> tuple[list[Operation], list[Exchange]]:
    """Return the operations and exchanges that contribute to results."""
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
            waiting += exchanged[tensor].used
        elif tensor.operation is not None:
            kept.add(id(tensor.operation))
            waiting += tensor.operation.inputs
    return (
        [o for o in operations if id(o) in kept],
        [exchange for t, exchange in exchanged.items() if t in seen],
    )
