"""What of a step runs on slices of a large weight, or of its gradient.

An operation can run on slices of the axes along which towers could divide it,
as its labels say. Lookups of rows, and their gradients, can run on slices of
the rows, too. ``weight_slices.py`` writes the program that does so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.layouts import REPLICATED, sizes_of
from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Program,
    Tensor,
    depends_on_batch,
    is_pure,
)
from keras_towers.partition.ir.reasons import NotDivided, require, unless_none
from keras_towers.partition.ir.registry import (
    Factors,
    Labels,
    NewAxis,
    facts_of,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.ir.values import Value
from keras_towers.partition.timeline.gathers import gathers_variables
from keras_towers.partition.timeline.sliced_weights.axis_slices import Cut

# A slice has at least so many bytes, and a weight at most so many slices: each
# of them is a level of the step, with operations of its own, whose graph takes
# megabytes.
_LEAST_BYTES = 2**23
_MOST_SLICES = 16
# The part of the gathered bytes that one slice may take, as of other weights.
_PARTS_AT_A_TIME = 4
# The entries of the longest constant whose entries are of interest: axes.
_MOST_KNOWN = 64
WRITES: Mapping[str, str] = {
    "AssignVariableOp": "ResourceScatterUpdate",
    "AssignAddVariableOp": "ResourceScatterAdd",
    "AssignSubVariableOp": "ResourceScatterSub",
}
"""What writes a variable, and what does so with some of its rows."""
ROWS = "rows of a table"
"""The label of the rows that a lookup picks, or to which its gradient adds."""


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """How an operation runs on slices.

    Attributes:
        label: the label of the axis that is cut.
        inputs: the axis of each input; None: it is not cut.
        outputs: the axis of each output; None: slices are added up.
        adds_up: whether the operation adds up along an axis, so that what it
            makes is a gradient, and what it takes is not.
    """

    label: Hashable
    inputs: Sequence[int | None]
    outputs: Sequence[int | None]
    adds_up: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class SlicedGradient:
    """A gradient that is exchanged in slices, and the update with it.

    Attributes:
        exchange: the exchange.
        cut: how its first axis is cut.
        chain: the operations that compute it, from the first one that runs on
            slices.
        updates: the operations that use it, and can run on slices as well.
        handles: the variables that these write, and nothing else does.
    """

    exchange: Exchange
    cut: Cut
    chain: Mapping[Operation, Use]
    updates: Mapping[Operation, Use]
    handles: Set[Tensor]


class SlicePlan:
    """What of a program runs on slices.

    Args:
        program: as for ``in_slices``, like the others.
        sizes: see there.
        gather_bytes: see there.
        xla: see there.

    Attributes:
        gathers: the gathers of large weights, and how each is cut.
        uses: the operations that use them.
        gradients: the large gradients.
    """

    def __init__(
        self,
        program: Program,
        sizes: TensorSizes,
        gather_bytes: int,
        xla: bool,
    ):
        self._program, self._sizes, self._most = program, sizes, gather_bytes
        self._users: dict[Tensor, list[Event]] = {}
        for event in program.events:
            for tensor in event.used:
                self._users.setdefault(tensor, []).append(event)
        self._results = {*program.results}
        self.gathers: dict[Tensor, tuple[Exchange, Cut]] = {}
        self.uses: dict[Operation, Use] = {}
        self.gradients: list[SlicedGradient] = []
        for exchange in program.exchanges:
            if gathers_variables(exchange):
                self._add_gather(exchange)
            elif exchange.kind == "scatter" and exchange.units is not None:
                self._add_gradient(exchange, xla)

    def variable_read_late(self, exchange: Exchange) -> Tensor | None:
        """Return the variable that gathers of slices may read, or None.

        It is written in slices, each of which waits for all that use it.
        """
        read, (_, cut) = exchange.given.operation, self.gathers[exchange.result]
        if read is None or read.type != "ReadVariableOp":
            return None
        (handle,) = read.inputs
        for gradient in self.gradients:
            if handle in gradient.handles and gradient.cut == cut:
                return handle
        return None

    def _cut_of(self, exchange: Exchange, whole: Tensor) -> Cut | None:
        """Return how a large weight, or its gradient, is cut."""
        shapes = exchange.given.shape, exchange.result.shape
        known = all(shape.is_fully_defined() and shape.rank for shape in shapes)
        size, axis = self._sizes.bytes_of(whole), exchange.axis
        if not known or "columns" in exchange.over or size <= self._most:
            return None
        given, result = ([int(n or 0) for n in shape] for shape in shapes)
        rows, most = sorted((given[axis], result[axis]))
        if rows == 0 or most % rows or most == rows:
            # Towers have different numbers of rows.
            return None
        own, towers = min(given[0], result[0]), most // rows
        at_a_time = max(self._most // _PARTS_AT_A_TIME, _LEAST_BYTES)
        number = min(-(-size // at_a_time), _MOST_SLICES, own)
        if number < 2:
            return None
        return Cut(own, towers if axis == 0 else 1, number)

    def _add_gather(self, exchange: Exchange) -> None:
        whole, cut = exchange.result, self._cut_of(exchange, exchange.result)
        if cut is None or whole in self._results:
            return
        uses: dict[Operation, Use] = {}
        for user in self._users.get(whole, ()):
            if isinstance(user, Operation) and depends_on_batch(user.outputs):
                others = [t for t in user.inputs if t in self.gathers]
                is_only = user.inputs.count(whole) == 1 and not others
                index = user.inputs.index(whole)
                use = _use_of_input(user, index, 0) if is_only else None
                if use is not None and not self._is_of_gradient(user):
                    uses[user] = use
                    continue
            return
        self.gathers[whole] = exchange, cut
        self.uses.update(uses)

    def _is_of_gradient(self, operation: Operation) -> bool:
        """Whether an operation computes slices of a gradient."""
        return any(operation in g.chain for g in self.gradients)

    def _add_gradient(self, exchange: Exchange, xla: bool) -> None:
        cut = self._cut_of(exchange, exchange.given)
        chain = None if cut is None else self._chain_of(exchange)
        if cut is None or not chain:
            return
        updates = {} if xla else self._updates_with(exchange)
        handles = {o.inputs[0] for o in updates if o.type in WRITES}
        for handle in [*handles]:
            users = self._users[handle]
            if any(u.made == [] and u not in updates for u in users):
                handles.discard(handle)
        self.gradients.append(
            SlicedGradient(exchange, cut, chain, updates, handles)
        )

    def _chain_of(self, exchange: Exchange) -> dict[Operation, Use] | None:
        """Return the operations that compute slices of a large gradient."""
        chain: dict[Operation, Use] = {}
        waiting = [(exchange.given, 0)]
        made = {exchange.given}
        while waiting:
            tensor, axis = waiting.pop()
            operation = tensor.operation
            if operation is None or tensor in self._results:
                return None
            use = _use_for_output(operation, axis)
            if use is None or operation in self.uses:
                return None
            if chain.setdefault(operation, use).outputs != use.outputs:
                return None
            if use.adds_up:
                continue
            for given, at in zip(operation.inputs, use.inputs, strict=True):
                if at is not None and given not in made:
                    made.add(given)
                    waiting.append((given, at))
        inside: set[Event] = {exchange, *chain}
        used = [user for tensor in made for user in self._users[tensor]]
        return chain if inside.issuperset(used) else None

    def _updates_with(self, exchange: Exchange) -> dict[Operation, Use]:
        """Return the operations that update a weight by its gradient."""
        cut: dict[Tensor, int] = {exchange.result: 0}
        handles: set[Tensor] = set()
        updates: dict[Operation, Use] = {}
        count = -1
        while count < len(updates):
            count = len(updates)
            for operation in self._program.operations:
                if operation in updates:
                    continue
                use = self._update_of(operation, cut, handles)
                if use is None:
                    continue
                updates[operation] = use
                for tensor, axis in zip(
                    operation.outputs, use.outputs, strict=True
                ):
                    if axis is not None:
                        cut[tensor] = axis
                if operation.type in WRITES:
                    handles.add(operation.inputs[0])
        return updates

    def _update_of(
        self, operation: Operation, cut: dict[Tensor, int], handles: set[Tensor]
    ) -> Use | None:
        """Return how an operation runs on slices of what is cut already."""
        inputs = operation.inputs
        if operation.type == "ReadVariableOp":
            is_read = operation.of_update and inputs[0] in handles
            return Use(None, [None], [0]) if is_read else None
        if operation.type in WRITES:
            handle, value = inputs
            axis = cut.get(value) if "towers" in handle.axes else None
            return Use(None, [None, 0], []) if axis == 0 else None
        first = next((k for k, t in enumerate(inputs) if t in cut), None)
        is_of_shards = not depends_on_batch(operation.outputs)
        if first is None or not is_of_shards or operation.is_repeated:
            return None
        use = _use_of_input(operation, first, cut[inputs[first]])
        if use is None or use.label is ROWS:
            return None
        pairs = zip(inputs, use.inputs, strict=True)
        fits = all(cut.get(tensor, axis) == axis for tensor, axis in pairs)
        return use if fits else None


# ---- how operations run on slices --------------------------------------------


def _use_of_input(operation: Operation, index: int, axis: int) -> Use | None:
    """Return how an operation runs on slices of an input.

    Args:
        operation: the operation.
        index: the index of the input.
        axis: the axis of the input that is cut.
    """
    if operation.type == "GatherV2" and index == axis == 0:
        return _lookup(operation)
    factors, labels = _factors_of(operation)
    if factors is None:
        return None
    use = _use_with(labels[index][axis], factors, labels)
    if use is None or any(
        axis is None and tensor.dtype.is_floating and tensor.dtype.size < 4
        for tensor, axis in zip(operation.outputs, use.outputs, strict=True)
    ):
        # 16 bits would round each slice of a sum.
        return None
    return use


def _use_for_output(operation: Operation, axis: int) -> Use | None:
    """Return how an operation computes slices of its only output."""
    if len(operation.outputs) != 1 or operation.is_repeated:
        return None
    if operation.type == "UnsortedSegmentSum" and axis == 0:
        return Use(ROWS, [None] * 3, [0], adds_up=True)
    factors, labels = _factors_of(operation)
    (output,) = [None] if factors is None else factors.outputs
    if factors is None or output is None:
        return None
    return _use_with(output[axis], factors, labels)


def _use_with(
    label: Any, factors: Factors, labels_of_inputs: Sequence[Labels]
) -> Use | None:
    """Return how an operation runs on slices of a labeled axis."""
    if isinstance(label, NewAxis) or not factors.may_divide(label):
        return None

    def axes(of_all: Sequence[Labels | None]) -> list[int | None]:
        return [
            None
            if labels is None or label not in labels
            else labels.index(label)
            for labels in of_all
        ]

    adds_up = bool(factors.summed)
    return Use(label, axes(labels_of_inputs), axes(factors.outputs), adds_up)


def _lookup(operation: Operation) -> Use | None:
    """Return how a lookup of rows runs on slices of the rows."""
    _, numbers, along = operation.inputs
    axis = _known(along)
    ranks = numbers.shape.rank, operation.outputs[0].shape.rank
    has_batch = operation.attributes["batch_dims"].i
    if axis is None or axis.any() or has_batch or None in ranks:
        return None
    return Use(ROWS, [0, None, None], [None])


def _factors_of(
    operation: Operation,
) -> tuple[Factors | None, Sequence[Labels]]:
    """Return the axes of an operation, and the labels of its inputs."""
    facts = facts_of(operation.type)
    tensors = [*operation.inputs, *operation.outputs]
    shapes = [tensor.shape for tensor in tensors]
    is_known = all(shape.rank is not None for shape in shapes)
    if facts.labels is None or not is_pure(operation) or not is_known:
        return None, ()
    values = [
        Value(REPLICATED, whole=t, shape=sizes_of(t.shape), known=_known(t))
        for t in operation.inputs
    ]
    try:
        factors = facts.labels(_OperationAsNode(operation), *values)
        require(not factors.attributes and not factors.needs_rows)
        for index, entries in factors.entries.items():
            # The axes of a sum, but not a shape.
            known = unless_none(values[index].known)
            require([*entries] == np.ravel(known).tolist())
        return factors, factors.labels(values)
    except NotDivided:
        return None, ()


class _OperationAsNode:
    """An operation of a program, as functions that label its axes see nodes.

    Args:
        operation: the operation.
    """

    def __init__(self, operation: Operation):
        self.type: str = operation.type
        self._operation = operation

    @property
    def num_outputs(self) -> int:
        return len(self._operation.outputs)

    @property
    def shapes(self) -> list[tf.TensorShape]:
        return [tensor.shape for tensor in self._operation.outputs]

    def attr(self, name: str) -> Any:
        value = self._operation.attributes[name]
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [*found.i] if kind == "list" else found

    def dtype(self, index: int) -> tf.DType:
        return self._operation.inputs[index].dtype

    def output_dtype(self, index: int = 0) -> tf.DType:
        return self._operation.outputs[index].dtype


def _known(tensor: Tensor) -> Any:
    """Return the entries of a small constant of integers, or None."""
    source, size = tensor.operation, tensor.shape.num_elements()
    is_small = tensor.dtype.is_integer and (size or 0) < _MOST_KNOWN
    if source is None or source.type != "Const" or not is_small:
        return None
    value = tf.make_ndarray(source.attributes["value"].tensor)
    return value.astype(object)
