"""Operations on matrices and along vectors, and products of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    free,
    has_sum,
    inserted,
    nonlinear,
    one_order,
    rank_of,
    refuse_others,
    refuse_sums,
    rows_of,
    rule,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Rows,
    Shape,
    Value,
    examples,
    other,
    product,
    same,
    total,
)

_NONLINEAR = (
    *("MatrixInverse", "Cholesky", "Qr", "Svd", "SelfAdjointEigV2", "Lu"),
    *("MatrixDeterminant", "LogMatrixDeterminant", "MatrixSquareRoot"),
)
# How many axes they work along, which are the last.
_AXES = {
    **dict.fromkeys(("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"), 1),
    **dict.fromkeys(("FFT", "RFFT", "IRFFT", "IFFT"), 1),
    **dict.fromkeys(("MatrixBandPart", "MatrixDiagPart"), 2),
    **dict.fromkeys(("MatrixDiagPartV2", "MatrixDiagPartV3"), 2),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), 2),
    **dict.fromkeys(_NONLINEAR, 2),
    **dict.fromkeys(("FFT3D", "IFFT3D"), 3),
}


@rule(*_AXES)
def _of_matrix(
    node: Node, value: Value, *options: Value
) -> Value | list[Value]:
    own, kind = _AXES[node.type], node.type
    refuse_others(options, f"takes {kind} by what follows from the batch")
    if value.axis is not None and value.axis >= rank_of(node, 0, value) - own:
        if own == 1 and "Diag" in kind and rows_of(value).uniform:
            text = "makes a matrix of all pairs of examples"
            return other(text, of_numbers=True)
        raise DoesNotSplit(f"takes {kind} of a matrix of examples")
    degree = value.degree
    if kind in _NONLINEAR:
        degree = nonlinear(node, value)
    # Zero is linear, any other fill is not.
    filled = len(options) > 1 and options[-1].degree is not None
    if filled and kind.startswith("MatrixDiag"):
        raise DoesNotSplit("fills matrices with what is not zero")
    shapes = [node.static_shape(k) for k in range(node.num_outputs)]
    return [
        value.with_(degree=degree, shape=_like_first(value, s)) for s in shapes
    ]


def _like_first(value: Value, shape: Shape | None) -> Shape | None:
    """A shape of the trace, with the sizes in front that a tensor has."""
    if shape is None or value.shape is None:
        return shape
    ahead = value.shape[: max(len(shape) - 2, 1)]
    return (*ahead, *shape[len(ahead) :])


@rule("MatrixSolve", "MatrixTriangularSolve")
def _solved(node: Node, matrix: Value, right: Value) -> Value:
    refuse_sums(node, (matrix, right))
    free(node, matrix)
    result = aligned(node, (matrix, right), right.degree)
    rank = max(rank_of(node, 0, matrix), rank_of(node, 1, right))
    if result.axis is not None and result.axis >= rank - 2:
        raise DoesNotSplit("solves equations of examples together")
    return result.with_(shape=right.shape)


@rule("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def _with_diagonal(
    node: Node, matrix: Value, diagonal: Value, *which: Value
) -> Value:
    if any(k.known is None or k.known.size > 1 for k in which):
        raise DoesNotSplit("sets several diagonals of a matrix")
    rank = rank_of(node, 0, matrix)
    for value in (matrix, diagonal):
        if value.axis is not None and value.axis >= rank - 2:
            raise DoesNotSplit("takes MatrixSetDiag of a matrix of examples")
    column = inserted(diagonal, rank - 1)
    return added(node, (matrix, column), "joins", [rank, rank])


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
    if has_sum(values):
        return total(degree, shape=shape)
    found: dict[str, list[Rows]] = {}
    for value, names in zip(values, labels, strict=True):
        if value.rows is not None:
            name = "a loop" if value.axis is None else names[value.axis]
            at = out.index(name) if name in out else -1
            found.setdefault(name, []).append(value.rows.at(at))
    if not found:
        return same(degree, shape=shape)
    if len(found) > 1:
        raise DoesNotSplit("combines every example with every other")
    ((name, every),) = found.items()
    rows = one_order(node, every)
    if name in out or name == "a loop":
        return examples(rows, degree, shape=shape)
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
