"""Products of matrices, and operations on matrices."""

from __future__ import annotations

from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Value
from keras_towers.partition.node import Node
from keras_towers.partition.registry import axes

_BOTH = (frozenset({0}), frozenset({1}))
_LINEAR = (frozenset({0}),)
# How many axes they work along, which are the last.
_OF_LAST = {
    **dict.fromkeys(("MatrixInverse", "Cholesky", "Qr", "Svd", "Lu"), 2),
    **dict.fromkeys(("SelfAdjointEigV2", "MatrixDeterminant"), 2),
    **dict.fromkeys(("LogMatrixDeterminant", "MatrixSquareRoot"), 2),
    **dict.fromkeys(("MatrixExponential",), 2),
}
_LINEAR_OF_LAST = {
    **dict.fromkeys(("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"), 1),
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT"), 1),
    **dict.fromkeys(("MatrixBandPart", "MatrixDiagPart"), 2),
    **dict.fromkeys(("MatrixDiagPartV2", "MatrixDiagPartV3"), 2),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), 2),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"), 3),
}


@axes("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _product(node: Node, a: Value, b: Value) -> Factors | None:
    ranks = [node.rank(0), node.rank(1)]
    if None in ranks:
        return None
    single = node.type == "MatMul"
    names = ("transpose_a", "transpose_b") if single else ("adj_x", "adj_y")
    most = max(rank or 0 for rank in ranks) - 2
    batch = [f"batch{k}" for k in range(most)]
    labels = []
    pairs = (["left", "inner"], ["inner", "right"])
    for rank, name, pair in zip(ranks, names, pairs, strict=True):
        own = batch[most - ((rank or 0) - 2) :]
        ends = pair[::-1] if node.attr(name) else pair
        labels.append([*own, *ends])
    output = [*batch, "left", "right"]
    return Factors(labels, [output], frozenset({"inner"}), _BOTH)


@axes("Einsum")
def _einsum(node: Node, *inputs: Value) -> Factors | None:
    equation = node.attr("equation").decode().replace(" ", "")
    left, _, output = equation.partition("->")
    terms = left.split(",")
    repeated = any(len(set(term)) < len(term) for term in (*terms, output))
    if "." in equation or repeated:
        return None
    labels = [list(term) for term in terms]
    summed = frozenset(left) - frozenset(output) - {","}
    linear = [frozenset({k}) for k in range(len(terms))]
    return Factors(labels, [list(output)], summed, linear)


@axes(*_OF_LAST, *_LINEAR_OF_LAST)
def _of_matrices(node: Node, value: Value, *rest: Value) -> Factors | None:
    rank = node.rank(0)
    ranks = [node.output_rank(k) for k in range(node.num_outputs)]
    if rank is None or None in ranks:
        return None
    own = {**_OF_LAST, **_LINEAR_OF_LAST}[node.type]
    ahead = tuple(range(rank - own))
    outputs = [[*ahead, *([None] * ((r or 0) - len(ahead)))] for r in ranks]
    inputs = [[*ahead, *([None] * own)], *[None] * len(rest)]
    filled = len(rest) > 1 and node.type.startswith("MatrixDiag")
    linear = _LINEAR if node.type in _LINEAR_OF_LAST and not filled else ()
    return Factors(inputs, outputs, linear=linear)


@axes("MatrixSolve", "MatrixTriangularSolve", "MatrixSolveLs")
def _solved(node: Node, matrix: Value, right: Value, *rest: Value):
    rank = node.rank(0)
    if rank is None or node.rank(1) != rank:
        return None
    ahead = list(range(rank - 2))
    inputs = [[*ahead, None, None]] * 2
    given = [*inputs, *[None] * len(rest)]
    return Factors(given, [[*ahead, None, None]], linear=(frozenset({1}),))


@axes("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def _with_diagonal(node: Node, matrix: Value, diagonal: Value, *rest: Value):
    rank, own = node.rank(0), node.rank(1)
    if rank is None or own is None:
        return None
    ahead = list(range(rank - 2))
    behind = [None] * (own - len(ahead))
    inputs = [[*ahead, None, None], [*ahead, *behind], *[None] * len(rest)]
    return Factors(inputs, [[*ahead, None, None]], linear=(frozenset({0, 1}),))
