"""A program as the towers run it: their inputs, and a function per level."""

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
from keras_towers.fit.data.batches import TowerBatch, counts_of, tensors_in
from keras_towers.fit.step.graph_function import (
    CallMode,
    GraphFunction,
    Uncompilable,
)
from keras_towers.fit.step.step_order import StepOrder, row_of_rank
from keras_towers.partition.layouts import (
    REPLICATED,
    InputLayout,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
)
from keras_towers.partition.local_step import LocalStep
from keras_towers.partition.program import (
    Exchange,
    Function,
    Inputs,
    Operation,
    Program,
    Tensor,
    Update,
    emit,
    graph_of,
    needed_operations,
)
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport, next_key


@dataclasses.dataclass(frozen=True, eq=False)
class DividedBatch:
    """A global batch, and how each of its tensors is divided over towers.

    Attributes:
        batch: its micro-batches, the same number for each of K towers.
        spec: the specs of the batch of one device.
        divided: for each leaf, whether it has a row per example.
        layouts: the layouts of its N tensors, including the components of
            ragged and sparse tensors.
        of_all: the batch before micro-batching, with its start and total among
            the examples of all processes.
        fingerprint: by which ranks compare it; None: each has its own data.
    """

    batch: TowerBatch
    spec: Any
    divided: Sequence[bool]
    layouts: Sequence[InputLayout]
    of_all: TowerBatch
    fingerprint: tf.Tensor | None = None

    @property
    def share(self) -> tf.Tensor:
        """This process's share of all examples."""
        return share_of(self.batch.total, self.of_all.total)

    def values_of(
        self,
        inputs: Inputs,
        is_first: bool,
        local_step: LocalStep | None = None,
        is_first_of_all: bool = False,
    ) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
        """Return the inputs that towers share, and the inputs per micro-batch.

        Args:
            inputs: the inputs of the program.
            is_first: whether this is the first of the processes that compute
                the step together.
            local_step: the step, if it also needs inputs of the batch of all
                processes.
            is_first_of_all: whether this is the first of all processes.
        """
        pieces = [tensors_in(piece) for piece in self.batch.pieces]
        shared: dict[Any, Any] = {}
        parts: list[dict[Any, Any]] = [{} for _ in pieces]
        for index, layout in enumerate(self.layouts):
            tensor = inputs.of_graph[index]
            if layout == REPLICATED:
                shared[tensor] = pieces[0][index]
                continue
            for values, piece in zip(parts, pieces, strict=True):
                values[tensor] = piece[index]
        for name, tensor in inputs.sizes.items():
            index, axis = map(int, name.split("."))
            shared[tensor] = _same_size([p[index] for p in pieces], axis)
        counts = counts_of(self.batch, self.divided)

        def add_position(
            of: Inputs, batch: TowerBatch, has_first: bool
        ) -> None:
            """Add where each part begins in a batch, and its total."""
            shared[of.total] = tf.cast(batch.total, tf.int64)
            start = tf.cast(batch.start, tf.int64)
            for k, values in enumerate(parts):
                values[of.start] = start
                values[of.is_first] = tf.constant(has_first and k == 0)
                start = start + tf.cast(counts[k], tf.int64)

        add_position(inputs, self.batch, is_first)
        if inputs.has_rows is not None:
            shared[inputs.has_rows] = shared[inputs.total] > 0
        if local_step is not None:
            add_position(local_step.of_all, self.of_all, is_first_of_all)
        return shared, parts


def _same_size(parts: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    """Return the size of an axis that all parts of a batch share."""
    sizes = tf.stack([tf.shape(p, out_type=tf.int64)[axis] for p in parts])
    check = tf.debugging.assert_equal(
        sizes,
        sizes[0],
        "the batches of towers have different sizes along an axis other than "
        "the first, so they cannot be parts of one batch: pad all of them to "
        'the same size, or use batches="split"',
    )
    with tf.control_dependencies([check]):
        return tf.identity(sizes[0])


def share_of(here: Any, total: Any) -> tf.Tensor:
    """Return the number of local examples as a fraction of the total."""
    numbers = [tf.cast(number, tf.float64) for number in (here, total)]
    return tf.math.divide_no_nan(*numbers)


def layouts_of(batch: Any, divided: Sequence[bool]) -> list[InputLayout]:
    """Return how a batch is divided: by rows of examples.

    Args:
        batch: its specs.
        divided: for each of its leaves: whether it has a row per example; every
            tower gets the other leaves whole.
    """
    layouts: list[InputLayout] = []
    leaves = zip(tf.nest.flatten(batch), divided, strict=True)
    for index, (leaf, has_rows) in enumerate(leaves):
        layouts += _layouts(leaf, f"leaf{index}", has_rows)
    return layouts


def _layouts(leaf: Any, name: str, divided: bool) -> list[InputLayout]:
    if not divided:
        tensors = tf.nest.flatten(leaf, expand_composites=True)
        return [REPLICATED for tensor in tensors if tensor is not None]
    if isinstance(leaf, tf.RaggedTensorSpec):
        return [Sharded(0, name), RowSplits(name)]
    if isinstance(leaf, tf.SparseTensorSpec):
        sizes = tuple(leaf.shape[1:].as_list())
        return [SparseIndices(name), Sharded(0, name), SparseShape(sizes)]
    return [Sharded(0)]


class TowerProgram:
    """Adds a program to the current graph, for the towers of this process.

    Args:
        program: the program.
        mode: how towers call their functions; functions that XLA cannot compile
            are called without it.
        devices: the K towers' devices.
        transport: connects the processes.
        order: orders the exchanges between processes.

    Attributes:
        not_compiled: for each function that XLA cannot compile, the reason.
        compiled: the number of functions that XLA compiles.
    """

    def __init__(
        self,
        program: Program,
        mode: CallMode,
        devices: Sequence[str],
        transport: Transport,
        order: StepOrder,
    ):
        self.not_compiled: list[str] = []
        self.compiled = 0
        self._program = program
        self._mode: CallMode = mode
        self._devices = devices
        self._transport = transport
        self._order = order
        self._used = _used_elsewhere(program)
        self._summed = _summed(program)

    def add_to_graph(
        self,
        common: Mapping[Tensor, Any],
        parts: Sequence[dict[Tensor, Any]],
        update: Callable[[Update, list[list[Any]], list[Any]], None],
    ) -> list[Any]:
        """Add the program to this graph; return its results.

        Args:
            common: the inputs that all towers share.
            parts: the inputs of each micro-batch, in tower order; each tower
                computes the same number of them, one after another.
            update: called with an update, K lists of the towers' gradients, and
                a list of the gradients that all towers share.
        """
        program, devices = self._program, self._devices
        known = dict(common)
        number = len(parts) // len(devices)
        scopes = [ChainMap(part, known) for part in parts]
        towers = [
            _Tower(device, scopes[k * number : (k + 1) * number])
            for k, device in enumerate(devices)
        ]
        checks: list[Any] = []
        for level in range(program.levels):
            operations = [
                o
                for o in program.operations
                if o.level == level and not o.is_repeated
            ]
            once = [o for o in operations if not o.on_towers]
            self._compute_once(once, known, checks)
            of_towers = [o for o in operations if o.on_towers]
            if of_towers:
                self._compute_on_towers(of_towers, towers)
            exchanges = [e for e in program.exchanges if e.given.level == level]
            if exchanges:
                self._exchange(exchanges, known, towers)
            for change in program.updates:
                if change.level != level:
                    continue
                gradients = [tower.gradients(change) for tower in towers]
                shared = [
                    None if t.on_towers else _value(t, known)
                    for t in change.given
                ]
                with tf.control_dependencies(checks):
                    update(change, gradients, shared)
        with tf.device(devices[0]):
            return [_value(t, known) for t in program.results]

    def _compute_once(
        self,
        operations: Sequence[Operation],
        known: dict[Tensor, Any],
        checks: list[Any],
    ) -> None:
        """Add operations that each process computes, or only the first one."""
        is_root = self._transport.rank == 0
        here = [o for o in operations if is_root or not o.at_root]
        made = [t for o in here for t in o.outputs if t in self._used]
        graphs, gate = self._program.graphs, self._order.gate
        with tf.device(self._devices[0]):
            values = emit(here, known, made, graphs, gate, checks)
        known.update(zip(made, values, strict=True))

    def _compute_on_towers(
        self, operations: Sequence[Operation], towers: Sequence[_Tower]
    ) -> None:
        """Call a function of operations for each tower's micro-batches."""
        outputs = [t for o in operations for t in o.outputs if t in self._used]
        used = [t for o in operations for t in o.inputs]
        _, inputs = needed_operations(
            Function((), used, operations), lambda o: o.is_repeated
        )
        function = self._function(Function(inputs, outputs, operations))
        for tower in towers:
            made: list[Any] = []
            for part in tower.parts:
                # One micro-batch frees its memory before the next one begins.
                with tf.device(tower.device), tf.control_dependencies(made):
                    given = [_value(t, part) for t in inputs]
                    if made:
                        given = [_after_dependencies(value) for value in given]
                    part.update(_with_shapes(outputs, function(given)))
                    made = [
                        tower.add(t, part[t]) if t in self._summed else part[t]
                        for t in outputs
                    ]

    def _function(self, body: Function) -> GraphFunction:
        graph = graph_of(body, self._program.graphs)
        function = GraphFunction(graph, self._mode)
        if self._mode != "xla":
            return function
        try:
            function.check_xla(self._devices[0])
        except Uncompilable as error:
            self.not_compiled.append(str(error))
            return GraphFunction(graph, "called")
        self.compiled += 1
        return function

    def _exchange(
        self,
        exchanges: Sequence[Exchange],
        known: dict[Tensor, Any],
        towers: Sequence[_Tower],
    ) -> None:
        """Exchange tensors of towers, and add the results to their tensors."""
        transport = self._transport
        parts = [part for tower in towers for part in tower.parts]

        def given(exchange: Exchange) -> list[Any]:
            """Return what towers, or micro-batches, exchange."""
            tensor = exchange.given
            source = tensor.operation
            # Only the first process has it.
            if source is not None and source.at_root and transport.rank != 0:
                return []
            if exchange.kind == "sum":
                return [tower.sum(tensor) for tower in towers]
            return [_value(tensor, part) for part in parts]

        with tf.device(self._devices[0]):
            results = self._order.exchange(
                list(map(given, exchanges)),
                lambda values: exchange_tensors(exchanges, values, transport),
            )
        for exchange, result in zip(exchanges, results, strict=True):
            if exchange.result.on_towers:
                for part, value in zip(parts, result, strict=True):
                    part.update(_with_shapes([exchange.result], [value]))
            else:
                known.update(_with_shapes([exchange.result], [result]))


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
