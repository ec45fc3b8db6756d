"""A step over towers as data: operations, and exchanges between them.

Every exchange ends a level: the users of its result belong to later levels. A
level consists of operations that are computed once, then a function that every
tower runs, and then the exchanges of their results: in ``describe()``, a round.
Towers read their copies of variables before the function, and write them after.
A tower of a two-dimensional mesh has several devices, the columns of the mesh.
What differs between them is computed on each, and they, too, have exchanges.
``emit`` adds the operations to a TensorFlow graph.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.compiled_draws import CompiledDraws
from keras_towers.partition.kernels import Kernels, rename_calls


@dataclasses.dataclass(eq=False, slots=True)
class Tensor:
    """A tensor of a program.

    Attributes:
        dtype: its dtype.
        shape: its shape, as far as it is known; on towers, the local shape.
        on_towers: whether every tower has its own value.
        level: its level.
        operation: the operation that computes it; None: it is an input of the
            program, or the result of an exchange.
        index: its index among the outputs of the operation.
        handle: the handle data, if it is the handle of a variable.
        of_batch: on towers, whether it depends on rows of the batch, and so
            differs between the micro-batches of a tower.
        on_columns: whether every column of the mesh has its own value.
    """

    dtype: Any
    shape: tf.TensorShape
    on_towers: bool
    level: int = 0
    operation: Operation | None = None
    index: int = 0
    handle: Any = None
    of_batch: bool = True
    on_columns: bool = False


Axis: TypeAlias = Literal["columns", "towers", "ranks"]
ExchangeKind: TypeAlias = Literal[
    "sum", "gather", "scatter", "first", "before", "root"
]


class Phase(enum.IntEnum):
    """The phases of a level, which follow one another.

    Functions take values and return values: variables are read and written
    beside them, on the devices where they are. Around a function that XLA
    compiles, the reads and writes of its level may be compiled with it.

    Attributes:
        ONCE: what is computed once for all towers.
        READ: towers read their copies of variables.
        TOWERS: towers compute.
        WRITE: towers write their copies of variables.
    """

    ONCE = 0
    READ = 1
    TOWERS = 2
    WRITE = 3


def phase_on_towers(type_: str, inputs: Sequence[Tensor]) -> Phase:
    """Return the phase in which towers run an operation."""
    if all(tensor.handle is None for tensor in inputs):
        return Phase.TOWERS
    return Phase.READ if type_ == "ReadVariableOp" else Phase.WRITE


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """An operation of a program.

    Attributes:
        type: its type.
        inputs: its N inputs.
        attributes: its attributes, as ``AttrValue``.
        outputs: its outputs.
        level: its level.
        on_towers: whether every tower runs it.
        on_columns: whether every column of the mesh runs it.
        has_effect: whether it is kept even if its outputs are unused.
        is_repeated: whether every function that uses it adds it again, as it
            does constants, from which TensorFlow infers shapes.
        functions: the functions that it calls, by the attributes that name
            them: one function or several.
        source: the traced operation that it stands for, if any.
        at_root: whether only the first of several processes runs it.
        name: the name of the traced operation for which it was added, which
            TensorFlow shows in errors. Several operations may share it.
    """

    type: str
    inputs: Sequence[Tensor]
    attributes: Mapping[str, Any]
    outputs: list[Tensor]
    level: int
    on_towers: bool
    on_columns: bool = False
    has_effect: bool = False
    is_repeated: bool = False
    functions: Mapping[str, Function | Sequence[Function]] = dataclasses.field(
        default_factory=dict
    )
    source: Any = None
    at_root: bool = False
    name: str = ""

    @property
    def phase(self) -> Phase:
        """The phase of its level in which it runs."""
        if not self.on_towers:
            return Phase.ONCE
        return phase_on_towers(self.type, self.inputs)


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
        rows: of ``scatter``: for each tower, the first of its rows and their
            number.
        units: the size of the axis of variables in shards that the towers have
            these rows of; None: their rows are others.
        over: the axes along which it is exchanged, the inner one first. Towers
            of one process have a rank. Over ranks only, each tower of a process
            exchanges with those that have the same rows in the others.
        gradient: the operation of the trace that returns a gradient, by name,
            if a communication hook is to sum it over ranks.
    """

    kind: ExchangeKind
    given: Tensor
    result: Tensor
    axis: int = 0
    sizes: Sequence[Any] | None = None
    rows: tuple[Tensor, Tensor] | None = None
    units: int | None = None
    over: tuple[Axis, ...] = ("towers", "ranks")
    gradient: str = ""

    @property
    def is_own(self) -> bool:
        """Whether everyone who takes part has a result of its own."""
        if "columns" in self.over:
            return self.result.on_columns
        return self.result.on_towers and "towers" in self.over

    @property
    def used(self) -> list[Tensor]:
        """The tensors that it uses."""
        return [self.given, *(self.rows or ())]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Function:
    """The body of a loop, its condition, a branch, or a compiled function.

    Attributes:
        inputs: its N inputs.
        outputs: its outputs, which may include inputs.
        operations: its operations, in order.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    operations: Sequence[Operation]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Update:
    """An update of weights by an optimizer.

    Attributes:
        name: the name of the traced operation that stands for it.
        given: its inputs, such as the partial sums of a gradient.
        level: the level at whose end it is applied.
        rows: the tensors among ``given`` that are rows to be concatenated, and
            the global numbers of their rows, in symbols.
    """

    name: str
    given: Sequence[Tensor]
    level: int
    rows: Mapping[Tensor, Any] = dataclasses.field(default_factory=dict)


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
        is_first_part: for each micro-batch, whether it is its tower's first.
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
    is_first_part: Tensor
    sizes: Mapping[str, Tensor]
    copies: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    shares: Mapping[int, tuple[Tensor, Tensor]] = dataclasses.field(
        default_factory=dict
    )
    has_rows: Tensor | None = None
    of_columns: Sequence[ColumnInput] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A step over towers.

    Attributes:
        inputs: its inputs.
        operations: its operations, in order.
        exchanges: its exchanges.
        updates: its updates, in order.
        results: its results, in the order in which they were requested.
        graphs: the graphs whose functions are called unchanged.
        computed_once: traced operations that take rows, but are not divided.
        values: the values of the traced tensors, by their names.
        replaced_sums: the bytes of the sums in place of which rows are
            gathered, which is slow for batches larger than expected.
    """

    inputs: Inputs
    operations: Sequence[Operation]
    exchanges: Sequence[Exchange]
    updates: Sequence[Update]
    results: Sequence[Tensor]
    graphs: Sequence[Any]
    computed_once: Sequence[Any]
    values: Mapping[str, Any]
    replaced_sums: int = 0

    @property
    def levels(self) -> int:
        """The number of levels."""
        last = [operation.level for operation in self.operations]
        last += [exchange.given.level for exchange in self.exchanges]
        last += [update.level for update in self.updates]
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
    """Return the operations that a function needs, and what it captures.

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


def delay_operations(
    operations: Sequence[Operation],
    exchanges: Iterable[Exchange],
    updates: Iterable[Update],
    results: Iterable[Tensor],
) -> None:
    """Delay operations of towers to the levels that use their outputs.

    The first operations of the backward pass depend on the forward pass only,
    as does a layer's centered input. If they ran as early as possible, their
    outputs would be kept for every layer.

    Args:
        operations: the operations, in order; their levels are changed.
        exchanges: the exchanges, which are not delayed.
        updates: the updates; their gradients are not delayed.
        results: the results of the program.
    """
    uses: dict[Tensor, set[int]] = {}

    def use(tensors: Iterable[Tensor], levels: Iterable[int]) -> None:
        for tensor in tensors:
            uses.setdefault(tensor, set()).update(levels)

    for exchange in exchanges:
        use(exchange.used, [exchange.given.level])
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
    """Whether a delay of the operation keeps no additional inputs in memory."""
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


# ---- emission ----------------------------------------------------------------

# The functions that were emitted are numbered.
_numbers = itertools.count()


def emit(
    operations: Sequence[Operation],
    given: Mapping[Tensor, Any],
    wanted: Sequence[Tensor],
    graphs: Iterable[Any] = (),
    after: Sequence[Any] = (),
    checks: list[Any] | None = None,
    names: dict[int, str] | None = None,
    kernels: Kernels | None = None,
) -> list[Any]:
    """Add operations to the current graph; return the tensors wanted.

    Operations keep their traced names, with a suffix if a name is taken.
    Repeated operations are added where they are used.

    Args:
        operations: the operations, in order.
        given: graph tensors, by the tensors of the program that the operations
            use but do not compute.
        wanted: N tensors that are computed or given.
        graphs: the graphs whose functions are called.
        after: graph tensors for which operations with effects wait.
        checks: a list to which graph operations are added that have an effect
            but use no variable, such as assertions.
        names: gets the names of the operations, by their ids.
        kernels: what XLA compiles, of draws in functions that are called
            without it; None: nothing.
    """
    if not operations and all(tensor in given for tensor in wanted):
        return [given[tensor] for tensor in wanted]
    here = compat.get_default_graph()
    for graph in graphs:
        compat.add_functions(here, graph._functions.values())
    definition = tf.compat.v1.GraphDef()
    definition.versions.CopyFrom(here.graph_def_versions)
    names = {} if names is None else names
    acts = any(operation.has_effect for operation in operations)
    gates = {f"^_gate{k}": tensor for k, tensor in enumerate(after) if acts}
    inputs: dict[str, Any] = {**gates}
    known: dict[Tensor, str] = {}
    draws = None if kernels is None else CompiledDraws(here, kernels)

    def name_of(tensor: Tensor) -> str:
        operation = tensor.operation
        if tensor in given:
            if tensor not in known:
                known[tensor] = f"_given{len(known)}"
                inputs[known[tensor]] = given[tensor]
            return known[tensor]
        assert operation is not None, "a tensor without a source"
        if id(operation) not in names:
            assert operation.is_repeated, operation.type
            add(operation)
        return f"{names[id(operation)]}:{tensor.index}"

    def add(operation: Operation) -> None:
        # A repeated operation may use more of them.
        sources = [name_of(tensor) for tensor in operation.inputs]
        node = definition.node.add()
        name = here.unique_name(operation.name or operation.type)
        node.name = names[id(operation)] = name
        node.op = operation.type
        node.input.extend(sources)
        if operation.has_effect:
            node.input.extend(gates)
        for key, value in operation.attributes.items():
            node.attr[key].CopyFrom(value)
        for key, functions in operation.functions.items():
            if isinstance(functions, Function):
                node.attr[key].func.name = added(functions)
                continue
            for function in functions:
                node.attr[key].list.func.add().name = added(function)
        if draws is not None:
            rename_calls(node.attr, draws.rename)

    def added(function: Function) -> str:
        graph_of_function = graph_of(function, graphs)
        atomic = compat.function_module.from_func_graph(
            f"function_{next(_numbers)}", graph_of_function, {}
        )
        compat.add_functions(here, [atomic])
        return tf.compat.as_str(atomic.name)

    for operation in operations:
        if not operation.is_repeated:
            add(operation)
    ends = [None if tensor in given else name_of(tensor) for tensor in wanted]
    acting = [
        names[id(operation)]
        for operation in operations
        if checks is not None
        and operation.has_effect
        and all(tensor.dtype != tf.resource for tensor in operation.inputs)
    ]
    # TensorFlow cannot import a graph inside of control dependencies.
    with tf.control_dependencies(None):
        made = tf.graph_util.import_graph_def(
            definition,
            input_map=inputs,
            return_elements=[end for end in ends if end is not None] + acting,
            name="",
        )
    left = iter(made or ())
    results = [
        given[tensor] if end is None else next(left)
        for tensor, end in zip(wanted, ends, strict=True)
    ]
    if checks is not None:
        checks.extend(left)
    return results


def graph_of(function: Function, graphs: Iterable[Any] = ()) -> Any:
    """Return the graph of a function.

    Args:
        function: the function.
        graphs: the graphs whose functions it calls.
    """
    return graph_of_inputs(
        function.inputs,
        lambda known: emit(
            function.operations, known, function.outputs, graphs
        ),
    )


def graph_of_inputs(
    inputs: Sequence[Tensor],
    add: Callable[[dict[Tensor, Any]], list[Any]],
) -> Any:
    """Return the graph of a function of tensors.

    Args:
        inputs: the function's inputs.
        add: adds operations to the current graph, given its placeholders by the
            inputs; returns the outputs.
    """
    graph = compat.FuncGraph("towers")
    with graph.as_default():
        placeholders = {tensor: placeholder_of(tensor) for tensor in inputs}
        graph.inputs = list(placeholders.values())
        # Keep the order of operations that use the same variables.
        with compat.AutomaticControlDependencies() as ordered:
            graph.outputs = add(placeholders)
    graph.control_outputs.extend(ordered.ops_which_must_run)
    graph.structured_outputs = graph.outputs
    return graph


def placeholder_of(tensor: Tensor, shape: Any = None) -> Any:
    """Return a placeholder for a tensor, whose shape may be known better."""
    result = tf.compat.v1.placeholder(tensor.dtype, shape or tensor.shape)
    if tensor.handle is not None:
        compat.set_handle_data(result, tensor.handle)
    return result
