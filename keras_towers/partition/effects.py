"""Operations that are computed once, and the order of side effects."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.builder import Builder
from keras_towers.partition.conversions import Converter, is_small
from keras_towers.partition.layouts import REPLICATED, Value, Values, require
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node

_READS = (
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
)
# Given the same seed, XLA draws different numbers from TensorFlow's kernels.
_DRAWN_BY_XLA = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
)
# Operations that either fail or do nothing.
_CHECKS = ("Assert", "CheckNumericsV2")
_BY_REFERENCE = tuple(
    dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
)


# ---- effects -----------------------------------------------------------------


class Effect(enum.IntEnum):
    """The effect of an operation, from the weakest to the strongest.

    Attributes:
        NONE: none, or it reads variables.
        PER_PROCESS: every process has the same effect: a write to variables, or
            a new object that belongs to the process.
        EXTERNAL: an effect that must happen once: draws from a generator,
            output, calls of Python, and the use of tables, queues or files.
    """

    NONE = 0
    PER_PROCESS = 1
    EXTERNAL = 2


def effect_of(operation: Any) -> Effect:
    """Return the effect of an operation, including the functions it calls."""
    if not operation.op_def.is_stateful or operation.type in _READS:
        return Effect.NONE
    if any(a.type in _BY_REFERENCE for a in operation.op_def.output_arg):
        return Effect.PER_PROCESS
    graphs = called_graphs(operation)
    if None in graphs:
        return Effect.EXTERNAL
    if graphs:
        operations = [o for graph in graphs for o in graph.get_operations()]
        return max((effect_of(o) for o in operations), default=Effect.NONE)
    if operation.type in _CHECKS:
        return Effect.PER_PROCESS
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    only_variables = resources and all(is_variable(t) for t in resources)
    return Effect.PER_PROCESS if only_variables else Effect.EXTERNAL


def is_variable(handle: Any) -> bool:
    """Whether a tensor is the handle of a variable."""
    data = compat.get_resource_handle_data(handle)
    return data is not None and data.is_set


def written(operation: Any) -> list[int]:
    """Return the indices of inputs that are variables it may write."""
    _, writes = compat.resources_of(operation)
    return [
        index
        for index, tensor in enumerate(operation.inputs)
        if tensor.dtype == tf.resource
        and tensor in writes
        and is_variable(tensor)
    ]


def _draws_in_xla(operation: Any) -> bool:
    """Whether an operation, or a function that it calls, draws in XLA."""
    return operation.type in _DRAWN_BY_XLA or any(
        _draws_in_xla(inner)
        for graph in called_graphs(operation)
        if graph is not None
        for inner in graph.get_operations()
    )


def called_graphs(operation: Any) -> list[Any]:
    """The graphs of called functions; None for one that is unknown."""
    names = []
    if compat.op_definition(operation.type) is None:
        names.append(operation.type)
    for value in operation.node_def.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names += [function.name for function in value.list.func]
    graph = operation.graph
    return [compat.graph_of_function(graph, name) for name in names]


# ---- order -------------------------------------------------------------------


class ResourceOrder:
    """The times after which resources may be read and written.

    A time is twice the level, plus one for the operations of towers, as a level
    begins with the operations that are computed once.

    Attributes:
        copies: the common handles of mirrored variables, by the towers'
            handles.
    """

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}
        self._ready: dict[Any, tuple[int, int]] = {}
        self._least = (0, 0)

    def after(self, node: Node, operands: Sequence[Tensor], reads: bool) -> int:
        """Return the minimal level of an operation that uses resources.

        Args:
            node: the operation.
            operands: its inputs.
            reads: whether it only reads resources.
        """
        ready = [
            self._ready.get(key, self._least)
            for key in self._keys(node, operands)
        ]
        time = max(
            (times[0] if reads else times[1] for times in ready), default=0
        )
        return (time + 1 - _tower_phase(operands)) // 2

    def use(self, node: Node, operands: Sequence[Tensor], reads: bool) -> int:
        """Order later users of the same resources after an operation.

        Args:
            node: the operation.
            operands: its inputs.
            reads: whether it only reads resources.

        Returns:
            The minimal level of the operation.
        """
        least = self.after(node, operands, reads)
        level = max([least, *(tensor.level for tensor in operands)])
        time = 2 * level + _tower_phase(operands)
        for key in self._keys(node, operands):
            to_read, to_write = self._ready.get(key, self._least)
            to_read = to_read if reads else max(to_read, time)
            self._ready[key] = to_read, max(to_write, time)
        return least

    def update(
        self, handles: list[Any] | None, operands: Sequence[Tensor]
    ) -> int:
        """Order an update of variables; return the level at whose end it is.

        Args:
            handles: the handles of the variables; None: it may use any
                variable.
            operands: the inputs of the update.
        """
        keys = list(self._ready) if handles is None else handles
        # After the operations of towers in the level, and after operations that
        # may fail: a step whose assertion fails updates nothing.
        before = [
            self._ready.get(key, self._least)[1] // 2 for key in (*keys, None)
        ]
        level = max(
            [*before, *(tensor.level for tensor in operands)], default=0
        )
        ready = 2 * (level + 1), 2 * (level + 1)
        self._ready.update(dict.fromkeys(keys, ready))
        if handles is None:
            self._least = ready
        return level

    def _keys(self, node: Node, operands: Sequence[Tensor]) -> list[Any]:
        """The resources of an operation; None: a resource without a handle."""
        keys: list[Any] = [
            self.copies.get(t, t) for t in operands if t.dtype == tf.resource
        ]
        is_stateful = node.operation.op_def.is_stateful
        return keys or ([None] if is_stateful else [])


def _tower_phase(operands: Sequence[Tensor]) -> int:
    """Return 1 if towers run an operation, 0 if it is computed once.

    Within a level, what is computed once comes first.
    """
    return int(any(tensor.on_towers for tensor in operands))


# ---- operations computed once ------------------------------------------------


def compute_once(node: Node, inputs: Values) -> Values:
    """Compute an operation as one device does, and share the result."""
    partitioner = node.partitioner
    if any(not v.is_replicated and not v.is_partial for v in inputs):
        partitioner.once.append(node.operation)
    effect = effect_of(node.operation)
    if effect:
        return _add_effect(node, inputs, effect)
    if not _should_run_on_towers(node, inputs):
        operands = [partitioner.assemble(value) for value in inputs]
        outputs = _add_in_order(node, operands)
        return [Value(REPLICATED, whole=tensor) for tensor in outputs]
    order = partitioner.order
    local_operands = [partitioner.replicate(value) for value in inputs]
    whole_operands = [
        value.whole for value in inputs if value.whole is not None
    ]
    is_there = len(whole_operands) == len(local_operands) and (
        order.after(node, whole_operands, True)
        <= order.after(node, local_operands, True)
    )
    results = [
        Value(REPLICATED, t) for t in _add_in_order(node, local_operands)
    ]
    if is_there:
        # Operations that are computed once may use it, too.
        outputs = _add_in_order(node, whole_operands)
        for value, whole in zip(results, outputs, strict=True):
            value.whole = whole
    return results


def _add_effect(node: Node, inputs: Values, effect: Effect) -> Values:
    """Add an operation that has an effect, for all towers.

    Inside of a function nothing is done: the whole function is computed once.
    """
    partitioner = node.partitioner
    require(partitioner.can_exchange)
    variables = written(node.operation)
    mirrored = [k for k in variables if _is_on_every_tower(inputs[k])]
    if effect is Effect.PER_PROCESS and variables and mirrored == variables:
        # Each tower writes to its copies.
        local_operands = [partitioner.replicate(value) for value in inputs]
        outputs = _add_in_order(node, local_operands, reads=False)
        return [Value(REPLICATED, local) for local in outputs]
    at_root = partitioner.options.ranks and effect is Effect.EXTERNAL
    whole_operands = [partitioner.assemble(value) for value in inputs]
    results = _add_in_order(node, whole_operands, reads=False, at_root=at_root)
    if at_root:
        results = [
            _broadcast_from_root(partitioner, whole) for whole in results
        ]
    for index in variables if at_root else mirrored:
        _assign_everywhere(node, index, inputs[index], at_root)
    return [Value(REPLICATED, whole=whole) for whole in results]


def _add_in_order(
    node: Node,
    operands: Sequence[Tensor],
    reads: bool = True,
    at_root: bool = False,
) -> list[Tensor]:
    """Add an operation after earlier users of the same resources."""
    partitioner = node.partitioner
    least = partitioner.order.use(node, operands, reads)
    is_common = partitioner.can_exchange and not _tower_phase(operands)
    if partitioner.options.xla and is_common and _draws_in_xla(node.operation):
        return _add_xla_function(node, operands, least)
    return node.copy(
        operands,
        least=least,
        has_effect=not reads,
        at_root=at_root,
    )


def _add_xla_function(
    node: Node, operands: Sequence[Tensor], least: int
) -> list[Tensor]:
    """Add an operation as a function that XLA compiles."""
    body = Builder(can_exchange=False)
    inputs = [
        Tensor(t.dtype, t.shape, t.on_towers, handle=t.handle) for t in operands
    ]
    outputs = body.copy(node.operation, inputs)
    return node.partitioner.add(
        "StatefulPartitionedCall",
        operands,
        {
            "Tin": [tensor.dtype for tensor in inputs],
            "Tout": [tensor.dtype for tensor in outputs],
            "_XlaMustCompile": True,
        },
        [(tensor.dtype, tensor.shape) for tensor in outputs],
        least=least,
        functions={"f": Function(inputs, outputs, body.operations)},
        source=node.operation,
    )


def _broadcast_from_root(partitioner: Converter, whole: Tensor) -> Tensor:
    """Return the result of the first process on all processes."""
    if whole.dtype == tf.resource:
        # Loops return the handles that they take.
        return whole
    if whole.dtype != tf.variant:
        return partitioner.exchange("root", whole)
    # Processes exchange a list of tensors as a string.
    text = partitioner.op("SerializeTensor", [whole], (), at_root=True)
    text = partitioner.exchange("root", text)
    return partitioner.op(
        "ParseTensor", [text], whole.shape, out_type=tf.variant
    )


def _assign_everywhere(
    node: Node,
    index: int,
    variable: Value,
    at_root: bool,
) -> None:
    """Assign the new value of a variable to all of its copies.

    Args:
        node: the operation that has written it.
        index: the index of the variable's handle among the inputs.
        variable: the value of the handle.
        at_root: whether only the first process has written it.
    """
    partitioner = node.partitioner
    order = partitioner.order
    handle = partitioner.assemble(variable)
    (spec,) = compat.get_resource_handle_data(
        node.operation.inputs[index]
    ).shape_and_type
    value = partitioner.read(
        handle,
        tf.as_dtype(spec.dtype),
        tf.TensorShape(spec.shape),
        order.after(node, [handle], True),
    )
    if at_root:
        value = partitioner.exchange("root", value)
    operands = [partitioner.replicate(variable), value]
    partitioner.add(
        "AssignVariableOp",
        operands,
        {"dtype": value.dtype, "validate_shape": False},
        [],
        least=order.use(node, operands, False),
        has_effect=True,
    )


def _should_run_on_towers(node: Node, inputs: Values) -> bool:
    """Whether towers compute an operation on replicated values themselves.

    Small values are cheaper to recompute than to exchange, and towers have
    their own copies of mirrored variables.
    """
    if not all(value.is_replicated for value in inputs):
        return False
    pairs = list(zip(inputs, node.operation.inputs, strict=True))
    if any(
        t.dtype == tf.resource and not _is_on_every_tower(v) for v, t in pairs
    ):
        return False
    at_towers = [(v, t.shape) for v, t in pairs if _is_on_every_tower(v)]
    small = all(is_small(shape) for shape in node.shapes)
    if small and any(value.whole is None for value, _ in at_towers):
        return True
    return any(
        value.whole is not None or not is_small(shape)
        for value, shape in at_towers
    ) and all(
        _is_on_every_tower(v) or is_small(t.shape) or _is_repeated(v)
        for v, t in pairs
    )


def _is_on_every_tower(value: Value) -> bool:
    """Whether every tower has the whole value, without an exchange."""
    return value.layout == REPLICATED and value.local is not None


def _is_repeated(value: Value) -> bool:
    """Whether every function that uses a value computes it again."""
    operation = None if value.whole is None else value.whole.operation
    return operation is not None and operation.is_repeated
