"""Operations on matrices, and along vectors."""

from __future__ import annotations

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    all_outputs,
    free,
    inserted,
    rank_of,
    refuse_sums,
    rows_of,
    rule,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Shape,
    Value,
    other,
)

_MATRICES = [
    "MatrixBandPart",
    "MatrixDiag",
    "MatrixDiagV2",
    "MatrixDiagV3",
    "MatrixDiagPart",
    "MatrixDiagPartV2",
    "MatrixDiagPartV3",
    "FFT",
    "RFFT",
    "IRFFT",
    "IFFT",
    "FFT3D",
    "IFFT3D",
    "FFT2D",
    "IFFT2D",
    "RFFT2D",
    "IRFFT2D",
]
_OF_MATRICES = [
    "MatrixInverse",
    "Cholesky",
    "Qr",
    "Svd",
    "SelfAdjointEigV2",
    "MatrixDeterminant",
    "LogMatrixDeterminant",
    "Lu",
    "MatrixSquareRoot",
]


_OF_VECTORS = (
    *("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"),
    *("FFT", "RFFT", "IRFFT", "IFFT"),
)


@rule(*_MATRICES, *_OF_MATRICES)
def _of_matrix(node: Node, value: Value, *options: Value) -> list[Value]:
    own = 1 if node.type in _OF_VECTORS else 3 if "3D" in node.type else 2
    if any(not o.is_same for o in options):
        raise DoesNotSplit(f"takes {node.type} by what follows from the batch")
    if (
        value.kind is Kind.ROWS
        and rows_of(value).axis >= rank_of(node, 0, value) - own
    ):
        if own == 1 and "Diag" in node.type and rows_of(value).uniform:
            return all_outputs(
                node,
                other(
                    "makes a matrix of all pairs of examples", of_numbers=True
                ),
            )
        raise DoesNotSplit(f"takes {node.type} of a matrix of examples")
    degree = value.degree
    if node.type in _OF_MATRICES:
        refuse_sums(node, (value,))
        degree = free(node, value)
    if len(options) > 1:
        _check_fill(node, options[-1])
    shapes = [node.static_shape(k) for k in range(node.num_outputs)]
    return [
        value.with_(degree=degree, shape=_like_first(value, s)) for s in shapes
    ]


def _check_fill(node: Node, fill: Value) -> None:
    """Refuse to fill with anything but zero, which is linear."""
    if node.type.startswith("MatrixDiag") and fill.degree is not None:
        raise DoesNotSplit("fills matrices with what is not zero")


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
    if result.rows is not None and result.rows.axis >= rank - 2:
        raise DoesNotSplit("solves equations of examples together")
    return result.with_(shape=right.shape, rows=result.rows)


@rule("MatrixSetDiag")
def _with_diagonal(node: Node, matrix: Value, diagonal: Value) -> Value:
    return _joined(node, matrix, diagonal)


def _joined(node: Node, matrix: Value, diagonal: Value) -> Value:
    rank = rank_of(node, 0, matrix)
    for value in (matrix, diagonal):
        if value.rows is not None and value.rows.axis >= rank - 2:
            raise DoesNotSplit("takes MatrixSetDiag of a matrix of examples")
    column = inserted(diagonal, rank - 1)
    return added(node, (matrix, column), "joins", [rank, rank])


@rule("MatrixSetDiagV2", "MatrixSetDiagV3")
def _with_diagonals(
    node: Node, matrix: Value, diagonal: Value, which: Value
) -> Value:
    if which.known is None or which.known.size > 1:
        raise DoesNotSplit("sets several diagonals of a matrix")
    return _joined(node, matrix, diagonal)
