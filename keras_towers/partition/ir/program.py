"""A program: a step over towers as operations and exchanges between them.

It says what is computed and where, and what has to come before what; not when:
a ``Timeline`` does. Nothing of it changes once it is made.

A tower of a two-dimensional mesh has several devices, the columns of the mesh.
Each computes what differs between columns, and columns exchange, too.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.axes import BATCH, ONCE, Axes
from keras_towers.partition.ir.sizes import Dimension


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A tensor of a program.

    Attributes:
        dtype: its dtype.
        shape: its shape, as far as it is known; on towers, the local shape.
        axes: the axes along which it varies, as in ``axes``.
        operation: the operation that computes it; None: it is an input of the
            program, or the result of an exchange.
        index: its index among the outputs of the operation.
        handle: the handle data, if it is the handle of a variable.
        is_fixed: whether it is an input that never changes.
    """

    dtype: tf.DType
    shape: tf.TensorShape
    axes: Axes = ONCE
    # Operations show their tensors.
    operation: Operation | None = dataclasses.field(default=None, repr=False)
    index: int = 0
    handle: Any = None
    is_fixed: bool = False

    @property
    def type_of_content(self) -> tuple[tf.DType, tf.TensorShape]:
        """For the handle of a variable, the dtype and shape of its value."""
        (spec,) = self.handle.shape_and_type
        return tf.as_dtype(spec.dtype), tf.TensorShape(spec.shape)


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


def unrepeated(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors, or what repeated operations compute them from.

    A repeated operation is a part of those that use it.
    """
    found: dict[Tensor, None] = {}
    seen: set[Tensor] = set()
    waiting = [*tensors][::-1]
    while waiting:
        tensor = waiting.pop()
        source = tensor.operation
        if source is None or not source.is_repeated:
            found[tensor] = None
        elif tensor not in seen:
            seen.add(tensor)
            waiting += source.inputs[::-1]
    return [*found]


def computed_after(tensor: Tensor, phase: Phase) -> bool:
    """Whether a tensor of the same level is computed after a phase of it."""
    return tensor.operation is not None and tensor.operation.phase > phase


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """An operation of a program.

    Attributes:
        type: its type.
        inputs: its N inputs.
        attributes: its attributes, as ``AttrValue``.
        outputs: its outputs.
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
    """

    type: str
    inputs: Sequence[Tensor]
    attributes: Attributes
    outputs: list[Tensor]
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

    @property
    def used(self) -> Sequence[Tensor]:
        """The tensors that it uses."""
        return self.inputs

    @property
    def made(self) -> Sequence[Tensor]:
        """The tensors that it makes."""
        return self.outputs

    @property
    def phase(self) -> Phase:
        """The phase of its level in which it runs."""
        if "towers" not in axes_of(self.inputs):
            return Phase.ONCE
        # Each micro-batch has its own rows of a batch.
        if self.of_update and not depends_on_batch(self.inputs):
            return Phase.UPDATE
        if all(tensor.handle is None for tensor in self.inputs):
            return Phase.TOWERS
        return Phase.READ if self.type == "ReadVariableOp" else Phase.UPDATE

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
        part: for a ``gather`` of a slice: along axis 0, the first of the rows
            of each tower that take part, and their number; None: all do.
        reads: whether it reads the variable when it takes place: it holds no
            memory before, and nothing has written these rows by then.
        over: the axes that it crosses. Along other axes, there is an exchange
            at each place.
        gradient: the gradient that it sums for an optimizer, by the name of the
            tensor in the trace; "": none.
        round: exchanges with the same name take place together; "": it takes
            place on its own.
    """

    kind: ExchangeKind
    given: Tensor
    result: Tensor
    axis: int = 0
    sizes: Sequence[Dimension | None] | None = None
    rows: tuple[Tensor, Tensor] | None = None
    units: int | None = None
    part: tuple[int, int] | None = None
    reads: bool = False
    over: Axes = BATCH
    gradient: str = ""
    round: str = ""

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
    def used(self) -> Sequence[Tensor]:
        """The tensors that it uses."""
        return [self.given, *(self.rows or ())]

    @property
    def made(self) -> Sequence[Tensor]:
        """The tensors that it makes."""
        return [self.result]


Event: TypeAlias = Operation | Exchange
_E = TypeVar("_E", bound=Event)


def is_repeated(event: Event) -> bool:
    """Whether an event is an operation that every function adds again."""
    return isinstance(event, Operation) and event.is_repeated


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


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A step over towers: operations, and the exchanges between them.

    Attributes:
        inputs: its inputs.
        events: its operations and exchanges, each after those whose results it
            uses.
        before: by event: what comes before it although it uses no result of it,
            such as a write to a variable before a read of it.
        results: its results, in the order in which they were requested.
        graphs: the graphs whose functions are called unchanged.
        computed_once: traced operations that take rows, but are not divided,
            and why.
        values: the values of the traced tensors, by their names.
        replaced_sums: the bytes of the sums in place of which rows are
            gathered, which is slow for batches larger than expected.
    """

    inputs: Inputs
    events: Sequence[Event]
    before: Mapping[Event, Sequence[Event]]
    results: Sequence[Tensor]
    graphs: Sequence[tf.Graph]
    computed_once: Mapping[tf.Operation, str]
    values: Mapping[str, Any]
    replaced_sums: int = 0

    @functools.cached_property
    def operations(self) -> Sequence[Operation]:
        """Its operations, in order."""
        return [e for e in self.events if isinstance(e, Operation)]

    @functools.cached_property
    def exchanges(self) -> Sequence[Exchange]:
        """Its exchanges, in order."""
        return [e for e in self.events if isinstance(e, Exchange)]


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
    events: Sequence[Event], results: Iterable[Tensor]
) -> Sequence[Event]:
    """Return the events that contribute to results, or have an effect."""
    seen = set(results)
    kept: list[Event] = []
    for event in reversed(events):
        acts = isinstance(event, Operation) and event.has_effect
        if acts or not seen.isdisjoint(event.made):
            seen.update(event.used)
            kept.append(event)
    return kept[::-1]


def with_inputs(event: _E, inputs: Sequence[Tensor], **changes: Any) -> _E:
    """Return an event with other inputs, and with results of its own.

    Args:
        event: an operation or an exchange.
        inputs: what it is to use.
        **changes: what else is to change.
    """
    if isinstance(event, Exchange):
        given, *rows = inputs
        result = dataclasses.replace(event.result)
        return dataclasses.replace(
            event,
            given=given,
            rows=(rows[0], rows[1]) if rows else None,
            result=result,
            **changes,
        )
    outputs: list[Tensor] = []
    copy = dataclasses.replace(event, inputs=inputs, outputs=outputs, **changes)
    for tensor in event.outputs:
        outputs.append(dataclasses.replace(tensor, operation=copy))
    return copy


def mapped_edges(
    before: Mapping[Event, Sequence[Event]],
    stands_for: Callable[[Event], Sequence[Event]],
) -> Mapping[Event, Sequence[Event]]:
    """Return what comes before what once events have been replaced.

    Args:
        before: as in ``Program``.
        stands_for: returns the events in place of one; none if it is gone.
    """
    return {
        event: [e for other in others for e in stands_for(other)]
        for replaced, others in before.items()
        for event in stands_for(replaced)
    }


def changed_program(
    program: Program, change: Callable[[Operation], Mapping[str, Any]]
) -> Program:
    """Return a program with other operations.

    Args:
        program: the program.
        change: returns what is to differ in an operation, by attribute. What
            uses its results uses those of the new one.
    """
    tensors: dict[Tensor, Tensor] = {}
    events: dict[Event, Event] = {}

    for event in program.events:
        changes: dict[str, Any] = {}
        if isinstance(event, Operation):
            changes |= change(event)
        used: Sequence[Tensor] = changes.pop("inputs", event.used)
        inputs = [tensors.get(tensor, tensor) for tensor in used]
        events[event] = event
        if changes or inputs != [*event.used]:
            events[event] = with_inputs(event, inputs, **changes)
            pairs = zip(event.made, events[event].made, strict=True)
            tensors.update(pairs)

    def of_value(value: Any) -> Any:
        ends = {"local": value.local, "whole": value.whole}
        new = {k: tensors[t] for k, t in ends.items() if t in tensors}
        return dataclasses.replace(value, **new) if new else value

    return dataclasses.replace(
        program,
        events=[*events.values()],
        before=mapped_edges(program.before, lambda e: [events[e]]),
        results=[tensors.get(tensor, tensor) for tensor in program.results],
        values={k: of_value(value) for k, value in program.values.items()},
    )
