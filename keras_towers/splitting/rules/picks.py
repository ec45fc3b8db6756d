"""Picking rows by their indices, and adding up rows by their indices."""

from __future__ import annotations

import dataclasses

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    fixed,
    free,
    one_order,
    rank_of,
    refuse_sums,
    rows_of,
    rule,
    shape_of,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Shape,
    Value,
    same,
    total,
)

_FROM_OTHERS = "picks rows of other examples of the batch"


def picked(
    node: Node, values: Value, places: Value, axis: int, skipped: int
) -> Value:
    """Return the value of rows that are picked along an axis.

    Args:
        node: the operation.
        values: what they are picked from.
        places: indices of rows.
        axis: the axis of ``values`` that they count.
        skipped: number of axes that both have in common, in front.
    """
    free(node, places)
    if places.kind is Kind.SUM:
        raise DoesNotSplit("picks rows by a sum over the batch")
    first = shape_of(node, 0, values)
    rank = rank_of(node, 1, places)
    later = shape_of(node, 1, places)
    shape: Shape = (*first[:axis], *later[skipped:], *first[axis + 1 :])
    if values.kind is Kind.SUM:
        if places.kind is Kind.ROWS and values.degree is not None:
            raise DoesNotSplit(
                "gives every example a sum or mean over the batch"
            )
        return values.with_(shape=shape)
    found: list[tuple[int, Value]] = []
    if values.kind is Kind.ROWS:
        own = rows_of(values).axis
        if own == axis:
            raise DoesNotSplit(_FROM_OTHERS)
        found.append((own if own < axis else own + rank - skipped - 1, values))
    if places.kind is Kind.ROWS:
        own = rows_of(places).axis
        at = own if own < skipped else axis + own - skipped
        found.append((at, places))
    if not found:
        return same(values.degree, shape=shape)
    if len({at for at, _ in found}) > 1:
        raise DoesNotSplit("combines every example with every other")
    at = found[0][0]
    rows = one_order(node, [value for _, value in found])
    moved = dataclasses.replace(
        rows, axis=at, uniform=rows.uniform and len(found) == 1
    )
    return Value(Kind.ROWS, values.degree, moved, shape=shape)


@rule("GatherV2", "Gather")
def _gathered(node: Node, values: Value, places: Value, *along: Value) -> Value:
    axis, skipped = 0, 0
    if along:
        axis = int(fixed(along[0])) % rank_of(node, 0, values)
        skipped = node.attr("batch_dims")
        skipped += rank_of(node, 1, places) if skipped < 0 else 0
    return picked(node, values, places, axis, skipped)


@rule("GatherNd")
def _gathered_at(node: Node, values: Value, places: Value) -> Value:
    refuse_sums(node, (places,))
    free(node, places)
    if values.kind is Kind.ROWS:
        raise DoesNotSplit(_FROM_OTHERS)
    if values.kind is Kind.SUM and places.kind is Kind.ROWS:
        raise DoesNotSplit("gives every example a sum or mean over the batch")
    shape: Shape | None = None
    if values.shape is not None and places.shape is not None:
        depth = places.shape[-1]
        if isinstance(depth, int):
            shape = (*places.shape[:-1], *values.shape[depth:])
    if places.kind is Kind.ROWS:
        if rows_of(places).axis == rank_of(node, 1, places) - 1:
            raise DoesNotSplit("picks a row by the indices of all examples")
        return places.with_(degree=values.degree, shape=shape)
    return values.with_(shape=shape)


def scattered(
    node: Node, places: Value, rows: Value, shape: Shape | None
) -> Value:
    """Return the value of rows that are added up by their indices."""
    free(node, places)
    if places.kind is Kind.SUM:
        raise DoesNotSplit("adds up rows by a sum over the batch")
    if Kind.ROWS not in (places.kind, rows.kind):
        return rows.with_(shape=shape)
    if all(v.rows is None or v.rows.axis < 0 for v in (places, rows)):
        return aligned(node, (places, rows), rows.degree, [0, 0]).with_(
            rows=Rows(-1), shape=shape
        )
    if rows.kind is Kind.SUM:
        raise DoesNotSplit("adds sums over the batch up by examples")
    if places.rows is None:
        raise DoesNotSplit("puts parts of examples among others")
    if rows.rows is not None:
        if places.rows.axis != rows.rows.axis:
            raise DoesNotSplit("combines every example with every other")
        one_order(node, [places, rows])
    return total(rows.degree, shape=shape)


@rule("UnsortedSegmentSum", "SegmentSum")
def _segments(node: Node, rows: Value, segments: Value, *count: Value) -> Value:
    if rows.kind is Kind.ROWS and segments.kind is not Kind.ROWS:
        axis = rows_of(rows).axis
        rank = rank_of(node, 1, segments)
        if axis >= rank and rows.shape is not None:
            known = None if not count else count[0].known
            size = None if known is None else known.flat[0]
            size = size if isinstance(size, int) else None
            shape = (size, *rows.shape[rank:])
            return rows.moved(axis - rank + 1, shape=shape)
    if count and count[0].grows or not all(c.is_same for c in count):
        raise DoesNotSplit("makes a segment for every example")
    if node.type == "SegmentSum" and segments.kind is Kind.ROWS:
        raise DoesNotSplit("makes as many segments as follow from the data")
    return scattered(node, segments, rows, node.static_shape())


@rule("ScatterNd")
def _scattered(node: Node, places: Value, rows: Value, target: Value) -> Value:
    if target.grows:
        raise DoesNotSplit("makes a row for every example by its index")
    return scattered(node, places, rows, node.static_shape())


@rule("TensorScatterAdd", "TensorScatterSub")
def _added_to(node: Node, tensor: Value, places: Value, rows: Value) -> Value:
    if places.is_same and not places.grows:
        return _in_place(node, tensor, places, rows)
    if tensor.kind is Kind.ROWS:
        raise DoesNotSplit("writes rows of other examples of the batch")
    rest = scattered(node, places, rows, tensor.shape)
    rank = rank_of(node, 0, tensor)
    return added(node, (tensor, rest), "adds", [rank, rank])


@rule("TensorScatterUpdate", "TensorScatterMax", "TensorScatterMin")
def _written(node: Node, tensor: Value, places: Value, rows: Value) -> Value:
    if not places.is_same or places.grows:
        raise DoesNotSplit(
            "writes rows where examples say, of which the last one stays"
        )
    if node.type != "TensorScatterUpdate":
        refuse_sums(node, (tensor, rows))
    return _in_place(node, tensor, places, rows)


def _in_place(node: Node, tensor: Value, places: Value, rows: Value) -> Value:
    """Write parts of a tensor at indices that are the same everywhere."""
    if places.shape is None or not isinstance(places.shape[-1], int):
        raise NotFollowed("writes along axes that are not known")
    rank = rank_of(node, 0, tensor)
    # The axes that the indices count, and those of the indices.
    counted, ahead = places.shape[-1], len(places.shape) - 1
    for value, first in ((tensor, counted), (rows, ahead)):
        if value.rows is not None and 0 <= value.rows.axis < first:
            raise DoesNotSplit("writes rows of other examples of the batch")
    parts = [rows.with_(shape=None, rows=rows.rows), tensor]
    if rows.rows is not None and rows.rows.axis >= 0:
        parts[0] = rows.moved(rows.rows.axis - ahead + counted)
    result = added(node, parts, "joins", [rank, rank])
    return result.with_(shape=tensor.shape, rows=result.rows)


@rule("Bincount", "DenseBincount")
def _counted(node: Node, places: Value, size: Value, weights: Value) -> Value:
    refuse_sums(node, (places, weights))
    free(node, places)
    if not size.is_same or size.grows:
        raise DoesNotSplit(
            "counts values up to a number that follows from the batch"
        )
    binary = node.type == "DenseBincount" and node.attr("binary_output")
    degree = 0 if binary or weights.degree is None else weights.degree
    shape = node.static_shape()
    if Kind.ROWS not in (places.kind, weights.kind):
        return same(degree, shape=shape)
    if places.kind is not Kind.ROWS:
        raise DoesNotSplit("counts weights of examples")
    if weights.kind is Kind.ROWS:
        if rows_of(weights).axis != rows_of(places).axis:
            raise DoesNotSplit("combines every example with every other")
        places = places.with_(
            rows=one_order(node, (places, weights)), shape=places.shape
        )
    if node.type == "DenseBincount" and rank_of(node, 0, places) == 2:
        if rows_of(places).axis == 0:
            if shape is not None and places.shape is not None:
                known = None if size.known is None else size.known.flat[0]
                columns = known if isinstance(known, int) else shape[1]
                shape = (places.shape[0], columns)
            whole = places.with_(degree=degree, shape=shape)
            return whole.with_(rows=_not_uniform(node, places), shape=shape)
        raise DoesNotSplit("counts along the examples of the batch")
    if binary:
        raise DoesNotSplit("asks whether any example of the batch is something")
    return total(degree, shape=shape)


def _not_uniform(node: Node, value: Value) -> Rows:
    rows = node.layouts.resolved(rows_of(value))
    return rows.in_order(rows.outer, rows.inner)
