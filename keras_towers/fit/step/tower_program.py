"""A program as the towers run it: one function per tower and level."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.step.graph_function import (
    CallMode,
    GraphFunction,
    Uncompilable,
)
from keras_towers.fit.step.step_order import StepOrder, row_of_rank
from keras_towers.partition.emission import emit, graph_of
from keras_towers.partition.program import (
    Exchange,
    Function,
    Operation,
    Program,
    Tensor,
    Update,
    needed_operations,
)
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport, next_key


@dataclasses.dataclass(frozen=True, eq=False)
class _Level:
    """The computations up to exchanges and updates, and these.

    Attributes:
        common: the operations computed once in each process, or only in the
            first process.
        made: the results of ``common`` that are used elsewhere.
        function: the function that each tower calls, or None.
        inputs: the inputs of the function.
        outputs: the outputs of the function.
        exchanges: the exchanges that follow.
        updates: the updates that follow.
    """

    common: Sequence[Operation]
    made: Sequence[Tensor]
    function: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    exchanges: Sequence[Exchange]
    updates: Sequence[Update]


class TowerProgram:
    """A program as functions that all towers call.

    Args:
        program: the program.
        mode: how towers call their functions; functions that XLA cannot compile
            are called without it.
        device: a tower's device, for which XLA compiles.

    Attributes:
        not_compiled: for each function that XLA cannot compile, the reason.
        compiled: the number of functions that XLA compiles.
    """

    def __init__(self, program: Program, mode: CallMode, device: str):
        self._program = program
        self._device = device
        self.not_compiled: list[str] = []
        self.compiled = 0
        levels = range(program.levels)
        self._summed = _summed(program)
        used = _used_elsewhere(program)
        self._levels = [self._level(level, used, mode) for level in levels]

    def _level(
        self, level: int, elsewhere: set[Tensor], mode: CallMode
    ) -> _Level:
        program = self._program
        of_towers: list[Operation] = []
        common: list[Operation] = []
        for operation in program.operations:
            if operation.level == level and not operation.is_repeated:
                (of_towers if operation.on_towers else common).append(operation)
        made = [t for o in common for t in o.outputs if t in elsewhere]
        outputs = [t for o in of_towers for t in o.outputs if t in elsewhere]
        used = [t for o in of_towers for t in o.inputs]
        _, inputs = needed_operations(
            Function((), used, of_towers), lambda o: o.is_repeated
        )
        function = None
        if of_towers:
            body = Function(inputs, outputs, of_towers)
            function = self._function(body, mode)
        exchanges = [e for e in program.exchanges if e.given.level == level]
        updates = [u for u in program.updates if u.level == level]
        return _Level(
            common, made, function, inputs, outputs, exchanges, updates
        )

    def _function(self, body: Function, mode: CallMode) -> GraphFunction:
        graph = graph_of(body, self._program.graphs)
        function = GraphFunction(graph, mode)
        if mode != "xla":
            return function
        try:
            function.check_xla(self._device)
        except Uncompilable as error:
            self.not_compiled.append(str(error))
            return GraphFunction(graph, "called")
        self.compiled += 1
        return function

    def add_to_graph(
        self,
        common: Mapping[Tensor, Any],
        parts: Sequence[dict[Tensor, Any]],
        devices: Sequence[str],
        transport: Transport,
        order: StepOrder,
        update: Callable[[Update, list[list[Any]], list[Any]], None],
    ) -> list[Any]:
        """Add the program to this graph; return its results.

        Args:
            common: the inputs that all towers share.
            parts: the inputs of each micro-batch, in tower order; each tower
                computes the same number of them, one after another.
            devices: the K towers' devices.
            transport: connects the processes.
            order: orders the exchanges between processes.
            update: called with an update, K lists of the towers' gradients, and
                a list of the gradients that all towers share.
        """
        program, is_root = self._program, transport.rank == 0
        known = dict(common)
        number = len(parts) // len(devices)
        scopes = [ChainMap(part, known) for part in parts]
        towers = [
            _Tower(device, scopes[k * number : (k + 1) * number])
            for k, device in enumerate(devices)
        ]
        checks: list[Any] = []
        for level in self._levels:
            common_here = [o for o in level.common if is_root or not o.at_root]
            made = [t for t in level.made if is_root or not _is_at_root(t)]
            with tf.device(devices[0]):
                values = emit(
                    common_here,
                    known,
                    made,
                    program.graphs,
                    order.gate,
                    checks,
                )
            known.update(zip(made, values, strict=True))
            if level.function is not None:
                for tower in towers:
                    self._call(level, tower)
            if level.exchanges:
                _exchange(level.exchanges, known, towers, transport, order)
            for change in level.updates:
                gradients = [tower.gradients(change) for tower in towers]
                shared = [
                    None if t.on_towers else _value(t, known)
                    for t in change.given
                ]
                with tf.control_dependencies(checks):
                    update(change, gradients, shared)
        with tf.device(devices[0]):
            return [_value(t, known) for t in program.results]

    def _call(self, level: _Level, tower: _Tower) -> None:
        """Call the function of a level for a tower's micro-batches."""
        made: list[Any] = []
        for part in tower.parts:
            # One micro-batch frees its memory before the next one begins.
            with tf.device(tower.device), tf.control_dependencies(made):
                inputs = [_value(t, part) for t in level.inputs]
                if made:
                    inputs = [_after_dependencies(tensor) for tensor in inputs]
                outputs = level.function(inputs)
                part.update(_with_shapes(level.outputs, outputs))
                made = [
                    tower.add(t, part[t]) if t in self._summed else part[t]
                    for t in level.outputs
                ]

    def describe_exchanges(self) -> list[str]:
        """Describe the exchanges, in their order: kind, dtype, shape."""
        return [
            f"{e.kind} {e.given.dtype.name} {e.result.shape}"
            for e in self._program.exchanges
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class _Tower:
    """The tensors of a tower in a step.

    Attributes:
        device: where it computes.
        parts: for each micro-batch its tensors, chained to the tensors that all
            towers share.
        sums: the sums over micro-batches of tensors that are summed over
            towers.
    """

    device: str
    parts: Sequence[ChainMap[Tensor, Any]]
    sums: dict[Tensor, Any] = dataclasses.field(default_factory=dict)

    def add(self, tensor: Tensor, value: Any) -> Any:
        """Add a micro-batch's tensor to a sum; return the sum so far."""
        before = self.sums.get(tensor)
        self.sums[tensor] = value if before is None else before + value
        return self.sums[tensor]

    def sum(self, tensor: Tensor) -> Any:
        """Return the sum over all micro-batches."""
        if tensor not in self.sums:
            for part in self.parts:
                self.add(tensor, _value(tensor, part))
        return self.sums[tensor]

    def concat(self, tensor: Tensor) -> Any:
        """Return the rows of all micro-batches."""
        rows = [_value(tensor, part) for part in self.parts]
        return rows[0] if len(rows) == 1 else tf.concat(rows, 0)

    def gradients(self, update: Update) -> list[Any]:
        """Return gradients for an update; None for those all towers share."""
        with tf.device(self.device):
            return [
                (self.concat if t in update.rows else self.sum)(t)
                if t.on_towers
                else None
                for t in update.given
            ]


def _exchange(
    exchanges: Sequence[Exchange],
    known: dict[Tensor, Any],
    towers: Sequence[_Tower],
    transport: Transport,
    order: StepOrder,
) -> None:
    """Exchange tensors of towers, and add the results to their tensors."""
    parts = [part for tower in towers for part in tower.parts]

    def given(exchange: Exchange) -> list[Any]:
        """Return the tensors of towers, or of micro-batches, to exchange."""
        tensor = exchange.given
        if _is_at_root(tensor) and transport.rank != 0:
            return []
        if exchange.kind == "sum":
            return [tower.sum(tensor) for tower in towers]
        return [_value(tensor, part) for part in parts]

    with tf.device(towers[0].device):
        results = order.exchange(
            list(map(given, exchanges)),
            lambda values: exchange_tensors(exchanges, values, transport),
        )
    for exchange, result in zip(exchanges, results, strict=True):
        if exchange.result.on_towers:
            for part, value in zip(parts, result, strict=True):
                part.update(_with_shapes([exchange.result], [value]))
        else:
            known.update(_with_shapes([exchange.result], [result]))


def _with_shapes(
    tensors: Sequence[Tensor], values: Sequence[Any]
) -> dict[Tensor, Any]:
    """Return values by their tensors, with the shapes of these.

    TensorFlow does not infer all shapes that the layout knows.

    Raises:
        TowerError: TensorFlow infers another shape.
    """
    for tensor, value in zip(tensors, values, strict=True):
        if not value.shape.is_compatible_with(tensor.shape):
            source = tensor.operation
            name = value.op.name if source is None else source.name
            raise TowerError(
                f"the step cannot be divided: {name!r} has the shape "
                f"{value.shape} where the layout has {tensor.shape}. This is a "
                "defect of keras_towers: please report it, with the model. "
                "Without a strategy, the model trains on one device."
            )
        value.set_shape(tensor.shape)
    return dict(zip(tensors, values, strict=True))


def _after_dependencies(tensor: Any) -> Any:
    """Return a tensor after the control dependencies of this block."""
    # TensorFlow would not recognize a copy of a handle as a constant.
    if tensor.dtype in (tf.resource, tf.variant):
        return tensor
    return tf.identity(tensor)


def _is_at_root(tensor: Tensor) -> bool:
    """Whether only the first process has a tensor."""
    return tensor.operation is not None and tensor.operation.at_root


def _value(tensor: Tensor, scope: Mapping[Tensor, Any]) -> Any:
    """Return the TensorFlow tensor of a program's tensor."""
    return scope[tensor] if tensor in scope else emit([], scope, [tensor])[0]


def _summed(program: Program) -> set[Tensor]:
    """The towers' tensors that are summed over all towers."""
    tensors = [e.given for e in program.exchanges if e.kind == "sum"]
    for update in program.updates:
        tensors += [t for t in update.given if t not in update.rows]
    return {tensor for tensor in tensors if tensor.on_towers}


def _used_elsewhere(program: Program) -> set[Tensor]:
    """Return tensors that are used outside of the function they come from."""
    used = {exchange.given for exchange in program.exchanges}
    used.update(program.results)
    for update in program.updates:
        used.update(update.given)
    for operation in program.operations:
        for tensor in operation.inputs:
            source = tensor.operation
            if source is not None and (
                operation.is_repeated
                or source.level != operation.level
                or source.on_towers != operation.on_towers
            ):
                used.add(tensor)
    return used


def exchange_tensors(
    exchanges: Sequence[Exchange],
    values_of_towers: Sequence[Sequence[Any]],
    transport: Transport,
) -> list[Any]:
    """Exchange the tensors of towers.

    Args:
        exchanges: N exchanges of a level.
        values_of_towers: for each exchange the tensors of this process's K
            towers; empty if only the first process has one.
        transport: connects the processes.

    Returns:
        The result of each exchange; for ``before`` a list of K results.
    """
    results: list[Any] = [
        _exchange_on_host(exchange, values) if values else None
        for exchange, values in zip(exchanges, values_of_towers, strict=True)
    ]
    if transport.size == 1:
        return results
    summed: dict[int, Any] = {}
    for k, exchange in enumerate(exchanges):
        if exchange.kind == "sum":
            summed[k] = results[k]
        elif exchange.kind == "before":
            here = tf.add_n(list(values_of_towers[k]))
            summed[k] = row_of_rank(here, transport)
    # Tensors of the same dtype are sent as one message.
    sums = sum_over_ranks(transport, list(summed.values())) if summed else []
    totals = dict(zip(summed, sums, strict=True))
    for k, exchange in enumerate(exchanges):
        match exchange.kind:
            case "sum":
                results[k] = totals[k]
            case "before":
                earlier = tf.reduce_sum(totals[k][: transport.rank], 0)
                results[k] = [before + earlier for before in results[k]]
            case "gather":
                axis = exchange.axis
                results[k] = _gather_over_ranks(results[k], axis, transport)
            case "root":
                results[k] = _from_root(exchange, results[k], transport)
    return results


def _exchange_on_host(exchange: Exchange, values: Sequence[Any]) -> Any:
    """Exchange the tensors of the towers of this process."""
    match exchange.kind:
        case "sum":
            return tf.add_n(list(values))
        case "gather":
            return tf.concat(list(values), exchange.axis)
        case "before":
            nothing = tf.zeros_like(values[0])
            return list(itertools.accumulate(values[:-1], initial=nothing))
        case _:
            return values[0]


def _gather_over_ranks(tensor: Any, axis: int, transport: Transport) -> Any:
    """Join the tensors of all ranks along an axis."""
    if axis == 0:
        return transport.all_gather(tensor, next_key("rows"))
    order = list(range(tensor.shape.rank))
    order[0], order[axis] = order[axis], order[0]
    rows = transport.all_gather(tf.transpose(tensor, order), next_key("rows"))
    return tf.transpose(rows, order)


def _from_root(exchange: Exchange, value: Any, transport: Transport) -> Any:
    """Give all ranks the first rank's tensor."""
    shape, dtype = exchange.given.shape, exchange.given.dtype
    is_here = transport.rank == 0

    def one() -> tf.Tensor:
        # TensorFlow's constant folding would run an exchange of constants, and
        # it merges exchanges of the same tensor, which other ranks do not have.
        return _variable_one().read_value()

    if shape.is_fully_defined() and dtype != tf.string:
        count = tf.reshape(one() * shape.num_elements(), [1])
        sent = value if is_here else tf.zeros(count, dtype)
        sent = tf.reshape(sent, shape)
        (result,) = transport.broadcast([sent], next_key("root"))
        return result
    # Other ranks may not know the shape, and contribute no rows.
    flat = tf.reshape(value, [-1]) if is_here else tf.zeros([one() - 1], dtype)
    rows = transport.all_gather(flat, next_key("root"))
    sizes = tf.shape(value) if is_here else tf.zeros([one() - 1], tf.int32)
    sizes = transport.all_gather(sizes, next_key("root"))
    return tf.ensure_shape(tf.reshape(rows, sizes), shape)


@functools.cache
def _variable_one() -> tf.Variable:
    return compat.hidden_variable(1, tf.int32)
