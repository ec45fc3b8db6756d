"""Picking rows by their indices, and adding up rows by their indices."""

from __future__ import annotations

import dataclasses

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    fixed,
    free,
    nonlinear,
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
    examples,
    same,
    total,
)

_EXAMPLES_AND_SUMS = "gives every example a sum or mean over the batch"
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
    first, later = shape_of(node, 0, values), shape_of(node, 1, places)
    shape: Shape = (*first[:axis], *later[skipped:], *first[axis + 1 :])
    if values.kind is Kind.SUM:
        if places.kind is Kind.ROWS and values.degree is not None:
            raise DoesNotSplit(_EXAMPLES_AND_SUMS)
        return values.with_(shape=shape)
    if values.axis == axis:
        raise DoesNotSplit(_FROM_OTHERS)
    every: list[Rows] = []
    if values.rows is not None:
        own = values.rows.axis
        behind = own > axis
        every.append(values.rows.at(own + behind * (len(later) - skipped - 1)))
    if places.rows is not None:
        own = places.rows.axis
        ahead = own >= skipped
        every.append(places.rows.at(own + ahead * (axis - skipped)))
    if not every:
        return same(values.degree, shape=shape)
    rows = one_order(node, every)
    # Other rows are picked for each example.
    uniform = rows.uniform and len(every) == 1
    rows = dataclasses.replace(rows, uniform=uniform)
    return examples(rows, values.degree, shape=shape)


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
    nonlinear(node, places)
    if values.kind is Kind.ROWS:
        raise DoesNotSplit(_FROM_OTHERS)
    if values.kind is Kind.SUM and places.kind is Kind.ROWS:
        raise DoesNotSplit(_EXAMPLES_AND_SUMS)
    shape: Shape | None = None
    if values.shape is not None and places.shape is not None:
        depth = places.shape[-1]
        if isinstance(depth, int):
            shape = (*places.shape[:-1], *values.shape[depth:])
    if places.kind is Kind.ROWS:
        if places.axis == rank_of(node, 1, places) - 1:
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
    if places.axis is None and rows.axis is None:
        result = aligned(node, (places, rows), rows.degree, [0, 0])
        return result.with_(rows=Rows(-1), shape=shape)
    if rows.kind is Kind.SUM:
        raise DoesNotSplit("adds sums over the batch up by examples")
    if places.rows is None:
        raise DoesNotSplit("puts parts of examples among others")
    if rows.rows is not None:
        one_order(node, [places.rows, rows.rows])
    return total(rows.degree, shape=shape)


@rule("UnsortedSegmentSum", "SegmentSum")
def _segments(node: Node, rows: Value, segments: Value, *count: Value) -> Value:
    if segments.kind is not Kind.ROWS and rows.axis is not None:
        rank = rank_of(node, 1, segments)
        if rows.axis >= rank and rows.shape is not None:
            known = [c.known.flat[0] for c in count if c.known is not None]
            size = known[0] if known and isinstance(known[0], int) else None
            shape = (size, *rows.shape[rank:])
            return rows.moved(rows.axis - rank + 1, shape=shape)
    if any(c.grows or not c.is_same for c in count):
        raise DoesNotSplit("makes a segment for every example")
    if node.type == "SegmentSum" and segments.kind is Kind.ROWS:
        raise DoesNotSplit("makes as many segments as follow from the data")
    return scattered(node, segments, rows, node.static_shape())


@rule("ScatterNd", sizes=(2,))
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
        if value.axis is not None and value.axis < first:
            raise DoesNotSplit("writes rows of other examples of the batch")
    written = rows.with_()
    if rows.axis is not None:
        written = rows.moved(rows.axis - ahead + counted)
    result = added(node, (written, tensor), "joins", [rank, rank])
    return result.with_(shape=tensor.shape)


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
    rows = rows_of(places)
    if weights.rows is not None:
        rows = one_order(node, (rows, weights.rows))
    if node.type == "DenseBincount" and rank_of(node, 0, places) == 2:
        if rows.axis:
            raise DoesNotSplit("counts along the examples of the batch")
        if shape is not None and places.shape is not None:
            known = None if size.known is None else size.known.flat[0]
            columns = known if isinstance(known, int) else shape[1]
            shape = (places.shape[0], columns)
        rows = node.layouts.resolved(rows)
        rows = rows.in_order(rows.outer, rows.inner)
        return places.with_(degree=degree, rows=rows, shape=shape)
    if binary:
        raise DoesNotSplit("asks whether any example of the batch is something")
    return total(degree, shape=shape)
