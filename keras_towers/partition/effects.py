"""What is computed once, for all towers, and in which order effects happen."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.builder import Builder
from keras_towers.partition.conversions import is_small
from keras_towers.partition.layouts import REPLICATED, Value, Values, require
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner

_READS = (
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
)
# XLA draws other numbers than TensorFlow's kernels, from the same seed.
_DRAWN_BY_XLA = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
)
# They fail, or do nothing.
_CHECKS = ("Assert", "CheckNumericsV2")
_BY_REFERENCE = tuple(
    dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
)


# ---- effects -----------------------------------------------------------------


class Effect(enum.IntEnum):
    """What an operation does, the strongest last.

    Attributes:
        NONE: nothing, or it reads variables.
        ALIKE: what every process does with the same result: it writes
            variables, or makes what belongs to a process.
        OUTSIDE: what is to happen once: it draws, prints, calls Python, or uses
            tables, queues or files.
    """

    NONE = 0
    ALIKE = 1
    OUTSIDE = 2


def effect_of(operation: Any) -> Effect:
    """Return what an operation does, with the functions that it calls."""
    if not operation.op_def.is_stateful or operation.type in _READS:
        return Effect.NONE
    if any(a.type in _BY_REFERENCE for a in operation.op_def.output_arg):
        return Effect.ALIKE
    graphs = _graphs_called(operation)
    if None in graphs:
        return Effect.OUTSIDE
    if graphs:
        operations = [o for graph in graphs for o in graph.get_operations()]
        return max((effect_of(o) for o in operations), default=Effect.NONE)
    if operation.type in _CHECKS:
        return Effect.ALIKE
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    only_variables = resources and all(is_variable(t) for t in resources)
    return Effect.ALIKE if only_variables else Effect.OUTSIDE


def is_variable(handle: Any) -> bool:
    """Whether a tensor is the handle of a variable."""
    data = compat.get_resource_handle_data(handle)
    return data is not None and data.is_set


def written(operation: Any) -> list[int]:
    """Return which inputs are handles of variables that it may write."""
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
        for graph in _graphs_called(operation)
        if graph is not None
        for inner in graph.get_operations()
    )


def _graphs_called(operation: Any) -> list[Any]:
    """The graphs of the functions that an operation calls; None: unknown."""
    names = []
    if compat.op_definition(operation.type) is None:
        names.append(operation.type)
    for value in operation.node_def.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names += [function.name for function in value.list.func]
    graph = operation.graph
    return [compat.graph_of_function(graph, name) for name in names]


# ---- their order -------------------------------------------------------------


class ResourceOrder:
    """The times from which on resources may be read, and written.

    A time is twice the level, and one more for what towers do in it: what is
    computed once comes first.

    Attributes:
        copies: of the towers' own handles of variables the common ones.
    """

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}
        self._ready: dict[Any, tuple[int, int]] = {}
        self._least = (0, 0)

    def after(self, node: Node, operands: Sequence[Tensor], reads: bool) -> int:
        """Return the level from which on an operation finds its resources.

        Args:
            node: the operation.
            operands: its inputs.
            reads: whether it reads resources only.
        """
        ready = [
            self._ready.get(key, self._least)
            for key in self._keys(node, operands)
        ]
        time = max(
            (times[0] if reads else times[1] for times in ready), default=0
        )
        return (time + 1 - _on_towers(operands)) // 2

    def use(self, node: Node, operands: Sequence[Tensor], reads: bool) -> int:
        """Have what uses the same resources later come behind an operation.

        Return the level from which on the operation finds its resources.

        Args:
            node: the operation that uses them.
            operands: its inputs.
            reads: whether it reads resources only.
        """
        least = self.after(node, operands, reads)
        level = max([least, *(tensor.level for tensor in operands)])
        time = 2 * level + _on_towers(operands)
        for key in self._keys(node, operands):
            to_read, to_write = self._ready.get(key, self._least)
            to_read = to_read if reads else max(to_read, time)
            self._ready[key] = to_read, max(to_write, time)
        return least

    def update(
        self, handles: list[Any] | None, operands: Sequence[Tensor]
    ) -> int:
        """Note an update of variables; return the level at whose end it is.

        Args:
            handles: those of the variables; None: it may be any.
            operands: the tensors that it is given.
        """
        keys = list(self._ready) if handles is None else handles
        # Behind what towers do in the level, and behind what may fail: a step
        # whose assertion fails updates nothing.
        before = [
            self._ready.get(key, self._least)[1] // 2 for key in (*keys, None)
        ]
        level = max(
            [*before, *(tensor.level for tensor in operands)], default=0
        )
        behind = 2 * (level + 1), 2 * (level + 1)
        self._ready.update(dict.fromkeys(keys, behind))
        if handles is None:
            self._least = behind
        return level

    def _keys(self, node: Node, operands: Sequence[Tensor]) -> list[Any]:
        """The resources that an operation uses; None: what has no name."""
        keys: list[Any] = [
            self.copies.get(t, t) for t in operands if t.dtype == tf.resource
        ]
        is_stateful = node.operation.op_def.is_stateful
        return keys or ([None] if is_stateful else [])


def _on_towers(operands: Sequence[Tensor]) -> int:
    """The part of a level in which an operation is done."""
    return int(any(tensor.on_towers for tensor in operands))


# ---- what is computed once ---------------------------------------------------


def computed_once(node: Node, inputs: Values) -> Values:
    """Compute an operation as one device does, for all towers."""
    partition = node.partition
    if any(not v.is_replicated and not v.is_partial for v in inputs):
        partition.once.append(node.operation)
    effect = effect_of(node.operation)
    if effect:
        return _with_effect(node, inputs, effect)
    if not _is_on_towers(node, inputs):
        operands = [partition.whole(value) for value in inputs]
        outputs = _done(node, operands)
        return [Value(REPLICATED, whole=tensor) for tensor in outputs]
    order = partition.order
    locals_ = [partition.replicated(value) for value in inputs]
    wholes = [value.whole for value in inputs if value.whole is not None]
    is_there = len(wholes) == len(locals_) and (
        order.after(node, wholes, True) <= order.after(node, locals_, True)
    )
    results = [Value(REPLICATED, t) for t in _done(node, locals_)]
    if is_there:
        # What is computed once may need it, too.
        outputs = _done(node, wholes)
        for value, whole in zip(results, outputs, strict=True):
            value.whole = whole
    return results


def _with_effect(node: Node, inputs: Values, effect: Effect) -> Values:
    """Do what has an effect as often as one device does, for all.

    In a loop or a branch, all of that is done once.
    """
    partition = node.partition
    require(partition.meets)
    variables = written(node.operation)
    mirrored = [k for k in variables if _has_local(inputs[k])]
    if effect is Effect.ALIKE and variables and mirrored == variables:
        # Each tower writes its own copies.
        locals_ = [partition.replicated(value) for value in inputs]
        made = _done(node, locals_, reads=False)
        return [Value(REPLICATED, local) for local in made]
    at_root = partition.options.ranks and effect is Effect.OUTSIDE
    wholes = [partition.whole(value) for value in inputs]
    results = _done(node, wholes, reads=False, at_root=at_root)
    if at_root:
        results = [_from_root(partition, whole) for whole in results]
    for index in variables if at_root else mirrored:
        _copy_to_all(node, index, inputs[index], at_root)
    return [Value(REPLICATED, whole=whole) for whole in results]


def _done(
    node: Node,
    operands: Sequence[Tensor],
    reads: bool = True,
    at_root: bool = False,
) -> list[Tensor]:
    """Add an operation behind what uses the same resources.

    Args:
        partition: makes the operations.
        node: the operation.
        operands: its inputs.
        reads: whether it reads resources only.
        at_root: whether of several processes only the first does it.
    """
    partition = node.partition
    least = partition.order.use(node, operands, reads)
    is_common = partition.meets and not _on_towers(operands)
    if partition.options.xla and is_common and _draws_in_xla(node.operation):
        return _done_by_xla(node, operands, least)
    return node.copy(
        operands,
        least=least,
        has_effect=not reads,
        at_root=at_root,
    )


def _done_by_xla(
    node: Node, operands: Sequence[Tensor], least: int
) -> list[Tensor]:
    """Add an operation as a function of its own, which XLA compiles."""
    body = Builder(meets=False)
    inputs = [
        Tensor(t.dtype, t.shape, t.on_towers, handle=t.handle) for t in operands
    ]
    outputs = body.copy(node.operation, inputs)
    return node.partition.add(
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


def _from_root(partition: Partitioner, whole: Tensor) -> Tensor:
    """Return for all processes what the first has computed."""
    if whole.dtype == tf.resource:
        # Loops return the handles that they are given.
        return whole
    if whole.dtype != tf.variant:
        return partition.exchange("root", whole)
    # A list of tensors travels as a text.
    text = partition.op("SerializeTensor", [whole], (), at_root=True)
    text = partition.exchange("root", text)
    return partition.op("ParseTensor", [text], whole.shape, out_type=tf.variant)


def _copy_to_all(
    node: Node,
    index: int,
    variable: Value,
    at_root: bool,
) -> None:
    """Have all write what was written once to a variable.

    Args:
        partition: makes the operations.
        node: what has written it.
        index: which of its inputs the variable's handle is.
        variable: the handle.
        at_root: whether only the first process has written it.
    """
    partition = node.partition
    order = partition.order
    handle = partition.whole(variable)
    (spec,) = compat.get_resource_handle_data(
        node.operation.inputs[index]
    ).shape_and_type
    value = partition.read(
        handle,
        tf.as_dtype(spec.dtype),
        tf.TensorShape(spec.shape),
        order.after(node, [handle], True),
    )
    if at_root:
        value = partition.exchange("root", value)
    operands = [partition.replicated(variable), value]
    partition.add(
        "AssignVariableOp",
        operands,
        {"dtype": value.dtype, "validate_shape": False},
        [],
        least=order.use(node, operands, False),
        has_effect=True,
    )


def _is_on_towers(node: Node, inputs: Values) -> bool:
    """Whether all towers have what an operation needs.

    What little they have is not worth an exchange, and what they have of
    mirrored variables nobody has to send them.
    """
    if not all(value.is_replicated for value in inputs):
        return False
    pairs = list(zip(inputs, node.operation.inputs, strict=True))
    if any(t.dtype == tf.resource and not _has_local(v) for v, t in pairs):
        return False
    at_towers = [(v, t.shape) for v, t in pairs if _has_local(v)]
    small = all(is_small(shape) for shape in node.shapes)
    if small and any(value.whole is None for value, _ in at_towers):
        return True
    return any(
        value.whole is not None or not is_small(shape)
        for value, shape in at_towers
    ) and all(
        _has_local(v) or is_small(t.shape) or _is_repeated(v) for v, t in pairs
    )


def _has_local(value: Value) -> bool:
    """Whether each tower has the value of one device itself."""
    return value.layout == REPLICATED and value.local is not None


def _is_repeated(value: Value) -> bool:
    """Whether every function that needs a value makes it anew."""
    operation = None if value.whole is None else value.whole.operation
    return operation is not None and operation.is_repeated
