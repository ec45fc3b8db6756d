"""Reading and writing variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    nonlinear,
    rank_of,
    refuse_others,
)
from keras_towers.splitting.rules.picks import picked, scattered
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Value,
    handle,
    other,
    same,
)

if TYPE_CHECKING:
    from keras_towers.splitting.interpreter import Interpreter


def current(interpreter: Interpreter, key: Any) -> Value:
    """Return what a variable holds now."""
    value = interpreter.state.get(key) or interpreter.initial.get(key)
    if value is None:
        raise DoesNotSplit("uses a variable that is not known")
    return value


def _key(node: Node, value: Value) -> Any:
    if value.kind is not Kind.HANDLE or value.key is None:
        raise DoesNotSplit("uses a variable that is chosen when the step runs")
    return value.key


def _read(interpreter: Interpreter, node: Node, given: list[Value]) -> Value:
    value = current(interpreter, _key(node, given[0]))
    return value.with_(shape=node.static_shape())


def write(
    interpreter: Interpreter, node: Node, given: Value, value: Value
) -> None:
    """Note that a variable holds another value."""
    key = _key(node, given)
    current(interpreter, key)
    if value.kind is Kind.ROWS:
        value = other(
            "keeps examples of the batch in a variable", node.operation
        )
    interpreter.state[key] = value.with_()
    interpreter.written[key] = node.operation


def _assign(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Sequence[Value]:
    target, value = given
    if node.type != "AssignVariableOp":
        before = current(interpreter, _key(node, target))
        value = _sum(node, before, value)
    write(interpreter, node, target, value)
    return []


def _sum(node: Node, before: Value, change: Value) -> Value:
    for value in (change, before):
        if value.kind is Kind.OTHER:
            return value
    parts = before.with_(shape=()), change.with_(shape=())
    try:
        return added(node, parts, "adds", [0, 0])
    except DoesNotSplit as error:
        return other(str(error), node.operation)


def _scatter_add(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Sequence[Value]:
    target, places, rows = given
    before = current(interpreter, _key(node, target))
    change = next((v for v in (places, rows) if v.kind is Kind.OTHER), None)
    if change is None:
        try:
            change = scattered(node, places, rows, None)
        except DoesNotSplit as error:
            change = other(str(error), node.operation)
    write(interpreter, node, target, _sum(node, before, change))
    return []


def _scatter(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Sequence[Value]:
    target, *rest = given
    before = current(interpreter, _key(node, target))
    unknown = [v for v in rest if v.kind is Kind.OTHER]
    text = "writes rows of a variable that follow from the batch"
    value = other(text, node.operation)
    if all(v.is_same for v in (before, *rest)):
        value = same()
    elif unknown:
        value = unknown[0].with_()
    write(interpreter, node, target, value)
    return []


def _gather(interpreter: Interpreter, node: Node, given: list[Value]) -> Value:
    value = _read(interpreter, node, given).with_()
    if given[1].kind is Kind.OTHER:
        return given[1]
    if node.attr("batch_dims"):
        raise NotFollowed("picks rows of rows of a variable")
    if value.kind is Kind.OTHER:
        return value
    static, later = node.static_shape(), given[1].shape
    behind = () if static is None or later is None else static[len(later) :]
    value = value.with_(shape=(None, *behind))
    return picked(node, value, given[1], 0, 0)


def _find(interpreter: Interpreter, node: Node, given: list[Value]) -> Value:
    """Look keys up in a table, which is the towers' common one."""
    _, keys, default = given
    for value in (keys, default):
        if value.kind is Kind.OTHER:
            return value
    text = "looks keys up by a default that is not the same"
    refuse_others([default], text)
    nonlinear(node, keys)
    rank = rank_of(node, 1, keys)
    found = aligned(node, (keys,), 0, [rank])
    # A table may hold lists, whose axes come last, as does its default.
    holds_numbers = node.output_rank() == rank or node.rank(2) == 0
    return found.with_(shape=keys.shape if holds_numbers else None)


_SCATTERS = ["Update", "Mul", "Div", "Min", "Max", "NdUpdate", "NdAdd", "NdSub"]
SPECIAL: dict[str, Any] = {
    "ReadVariableOp": _read,
    "ResourceGather": _gather,
    "AssignVariableOp": _assign,
    "AssignAddVariableOp": _assign,
    "AssignSubVariableOp": _assign,
    "ResourceScatterAdd": _scatter_add,
    "ResourceScatterSub": _scatter_add,
    "LookupTableFindV2": _find,
    "VariableShape": lambda interpreter, node, given: same(),
    "LookupTableSizeV2": lambda interpreter, node, given: same(shape=()),
    **{f"ResourceScatter{name}": _scatter for name in _SCATTERS},
    **dict.fromkeys(
        (
            *("VarHandleOp", "HashTableV2", "MutableHashTableV2"),
            *("AnonymousHashTable", "AnonymousMutableHashTable"),
            *("FIFOQueueV2", "AnonymousSeedGenerator"),
        ),
        lambda interpreter, node, given: handle(None),
    ),
}
