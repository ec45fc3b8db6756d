"""Products which sum over axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import one_order, rank_of, rule
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Shape,
    Value,
    product,
    same,
    total,
)


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matrices(node: Node, a: Value, b: Value) -> Value:
    ranks = rank_of(node, 0, a), rank_of(node, 1, b)
    names = (
        ("transpose_a", "transpose_b")
        if node.type == "MatMul"
        else ("adj_x", "adj_y")
    )
    flipped = [node.attr(name) for name in names]
    batch = [f"batch{k}" for k in range(max(ranks) - 2)]
    labels = [
        batch[len(batch) - (rank - 2) :] + (pair[::-1] if flip else pair)
        for rank, flip, pair in zip(
            ranks, flipped, (["left", "inner"], ["inner", "right"]), strict=True
        )
    ]
    return contracted(node, [a, b], labels, [*batch, "left", "right"])


@rule("Einsum")
def _einsum(node: Node, *values: Value) -> Value:
    equation = node.attr("equation").decode().replace(" ", "")
    left, out = equation.split("->")
    terms = left.split(",")
    ranks = [rank_of(node, k, value) for k, value in enumerate(values)]
    hidden = [
        rank - len(term.replace("...", ""))
        for rank, term in zip(ranks, terms, strict=True)
    ]
    dots = [f"dots{k}" for k in range(max(hidden, default=0))]

    def labels(term: str, count: int) -> list[str]:
        before, has, after = term.partition("...")
        return [*before, *(dots[len(dots) - count :] if has else ()), *after]

    named = [labels(t, h) for t, h in zip(terms, hidden, strict=True)]
    after = labels(out, len(dots))
    if any(len(set(label)) < len(label) for label in (*named, after)):
        raise DoesNotSplit("takes the diagonal of an axis")
    return contracted(node, values, named, after)


def contracted(
    node: Node,
    values: Sequence[Value],
    labels: Sequence[Sequence[str]],
    out: Sequence[str],
) -> Value:
    """Return the value of a product whose axes have names.

    Args:
        node: the operation.
        values: its N factors.
        labels: N lists of the names of their axes.
        out: those of the product; it is summed over all others.
    """
    degree = product(*(v.degree for v in values))
    shape = _shape(values, labels, out)
    sums = [v for v in values if v.kind is Kind.SUM]
    if sums:
        if len(sums) > 1:
            raise DoesNotSplit(
                "multiplies sums or means over the batch with each other"
            )
        if any(v.kind is Kind.ROWS and v.degree is not None for v in values):
            raise DoesNotSplit(
                "multiplies every example by a sum or mean over the batch"
            )
        return total(degree, shape=shape)
    found: dict[str, list[Value]] = {}
    for value, names in zip(values, labels, strict=True):
        if value.rows is not None:
            axis = value.rows.axis
            found.setdefault("a loop" if axis < 0 else names[axis], []).append(
                value
            )
    if not found:
        return same(degree, shape=shape)
    if len(found) > 1:
        raise DoesNotSplit("combines every example with every other")
    ((name, with_rows),) = found.items()
    rows = one_order(node, with_rows)
    if name == "a loop":
        return Value(Kind.ROWS, degree, rows, shape=shape)
    if name in out:
        moved = rows.at(out.index(name))
        return Value(Kind.ROWS, degree, moved, shape=shape)
    if rows.uniform and rows.unit is None:
        return same(product(degree, 1), shape=shape)
    return total(degree, shape=shape)


def _shape(
    values: Sequence[Value],
    labels: Sequence[Sequence[str]],
    out: Sequence[str],
) -> Shape | None:
    sizes: dict[str, Any] = {}
    for value, names in zip(values, labels, strict=True):
        if value.shape is None:
            return None
        for name, size in zip(names, value.shape, strict=True):
            if name not in sizes or sizes[name] in (None, 1):
                sizes[name] = size
    return tuple(sizes.get(name) for name in out)
