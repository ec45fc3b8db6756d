"""Operations that join tensors, and that take them apart."""

from __future__ import annotations

from typing import Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    all_outputs,
    dropped,
    fixed,
    inserted,
    rank_of,
    replaced,
    rows_of,
    rule,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Value,
    common,
)


@rule("Pack")
def _packed(node: Node, *values: Value) -> Value:
    rank = rank_of(node, 0, values[0])
    result = added(node, values, "joins", [rank] * len(values))
    return inserted(result, node.attr("axis") % (rank + 1), len(values))


@rule("Unpack")
def _unpacked(node: Node, value: Value) -> list[Value]:
    axis = node.attr("axis") % rank_of(node, 0, value)
    if value.kind is Kind.ROWS and rows_of(value).axis == axis:
        raise DoesNotSplit("takes the examples of the batch apart")
    return all_outputs(node, dropped(value, [axis]))


@rule("ConcatV2")
def _joined(node: Node, *values: Value) -> Value:
    *parts, along = values
    rank = rank_of(node, 0, parts[0])
    axis = int(fixed(along)) % rank
    size: Any = 0
    for part in parts:
        own = None if part.shape is None else part.shape[axis]
        size = None if size is None or own is None else size + own
    ranks = [rank] * len(parts)
    shapes = [
        p.with_(shape=replaced(p.shape, axis, 1), rows=p.rows) for p in parts
    ]
    along_axis = [
        p for p in parts if p.rows is not None and p.rows.axis == axis
    ]
    if not along_axis or any(
        p.kind is Kind.SUM and p.degree is not None for p in parts
    ):
        result = added(node, shapes, "joins", ranks)
        return result.with_(shape=replaced(result.shape, axis, size))
    degree = common((p.degree for p in parts), "joins")
    if len(along_axis) < len(parts):
        raise DoesNotSplit("joins examples with rows that are no examples")
    first, *rest = place = [rows_of(p) for p in parts]
    if any(rows.unit != first.unit for rows in rest):
        raise DoesNotSplit("joins the rows of examples in different orders")
    if all(rows.uniform for rows in place):
        place = [r.in_order(1, r.inner) for r in place]
    place = [node.layouts.resolved(rows) for rows in place]
    inner = {rows.inner for rows in place if not rows.uniform}
    if len(inner) != 1:
        raise DoesNotSplit("joins the rows of examples in different orders")
    (each,) = inner
    if any(rows.count % each for rows in place):
        raise DoesNotSplit("joins the rows of examples in different orders")
    outer = sum(rows.count // each for rows in place)
    shape = replaced(along_axis[0].shape, axis, size)
    rows = first.in_order(outer, each)
    return Value(Kind.ROWS, degree, rows, shape=shape)
