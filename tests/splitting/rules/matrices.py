"""Operations on matrices, and along vectors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.splitting.rules.case import Case, floats, ints, raw

_MATRIX = "of a matrix of examples"


def _on(name: str, function: Any, axes: str = "bdd"):
    """An operation on the last two axes."""
    letters = axes[:-2]
    return Case(name, function, floats(axes), letters, letters=letters)


def _square(function: Any) -> Any:
    """Make matrices that can be inverted."""
    return lambda x: function(
        tf.matmul(x, x, transpose_b=True) + tf.eye(2, dtype=x.dtype)
    )


_COMPLEX = {"dtype": "complex64"}
_MATRICES = [
    Case(
        "MatrixBandPart",
        lambda x: tf.linalg.band_part(x, 0, 1),
        floats("abc"),
        "a",
        {"b": _MATRIX},
    ),
    Case(
        "MatrixDiag",
        raw("MatrixDiag", "diagonal"),
        floats("abc"),
        "ab",
        {"c": _MATRIX},
    ),
    *(
        Case(
            name,
            lambda x, p, name=name: getattr(tf.raw_ops, name)(
                diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=p
            ),
            floats("abc", ""),
            letters="abc",
        )
        for name in ("MatrixDiagV2", "MatrixDiagV3")
    ),
    Case("MatrixDiagV3", tf.linalg.diag, floats("abc"), "ab", note="zero"),
    Case(
        "MatrixDiagPart",
        raw("MatrixDiagPart", "input"),
        floats("abc"),
        "a",
        {"b": _MATRIX},
    ),
    *(
        Case(
            name,
            lambda x, p, name=name: getattr(tf.raw_ops, name)(
                input=x, k=0, padding_value=p
            ),
            floats("abc", ""),
            letters="abc",
        )
        for name in ("MatrixDiagPartV2", "MatrixDiagPartV3")
    ),
    Case(
        "MatrixDiagPartV3", tf.linalg.diag_part, floats("abc"), "a", note="zero"
    ),
    Case(
        "MatrixSetDiag",
        raw("MatrixSetDiag", "input diagonal"),
        floats("abc", "ab"),
        "a",
    ),
    *(
        Case(
            name,
            lambda x, d, name=name: getattr(tf.raw_ops, name)(
                input=x, diagonal=d, k=0
            ),
            floats("abc", "ab"),
            "a",
        )
        for name in ("MatrixSetDiagV2", "MatrixSetDiagV3")
    ),
    *(
        Case(name, raw(name, "input"), floats(axes, **_COMPLEX), *said)
        for name, axes, *said in (
            ("FFT", "abc", "ab", {"c": _MATRIX}),
            ("IFFT", "abc", "ab", {"c": _MATRIX}),
            ("FFT2D", "abc", "a", {"b": _MATRIX}),
            ("IFFT2D", "abc", "a", {"b": _MATRIX}),
            ("FFT3D", "abcd", "a", {"b": _MATRIX}),
            ("IFFT3D", "abcd", "a", {"b": _MATRIX}),
        )
    ),
    Case("RFFT", lambda x: tf.signal.rfft(x, [4]), floats("abc"), "ab"),
    Case(
        "IRFFT",
        lambda x: tf.signal.irfft(x, [4]),
        floats("abb", **_COMPLEX),
        "a",
        letters="a",
    ),
    Case(
        "RFFT2D",
        lambda x: tf.signal.rfft2d(x, [4, 4]),
        floats("acc"),
        "a",
        letters="a",
    ),
    Case(
        "IRFFT2D",
        lambda x: tf.signal.irfft2d(x, [4, 4]),
        floats("acb", **_COMPLEX),
        "a",
        letters="a",
    ),
    _on("MatrixInverse", _square(tf.linalg.inv)),
    _on("Cholesky", _square(tf.linalg.cholesky), "bdd"),
    _on("Qr", lambda x: tf.linalg.qr(x), "bcd"),
    _on("Svd", lambda x: tf.linalg.svd(x), "bcd"),
    _on(
        "SelfAdjointEigV2",
        lambda x: tf.linalg.eigh(x + tf.linalg.matrix_transpose(x)),
        "bdd",
    ),
    _on("MatrixDeterminant", tf.linalg.det, "bdd"),
    _on("LogMatrixDeterminant", _square(tf.linalg.slogdet), "bdd"),
    _on("Lu", _square(tf.linalg.lu), "bdd"),
    _on("MatrixSquareRoot", _square(tf.linalg.sqrtm), "bdd"),
    Case(
        "MatrixSolve",
        lambda a, b: tf.linalg.solve(a + 3 * tf.eye(2), b),
        floats("add", "adb"),
        "a",
        letters="ab",
    ),
    Case(
        "MatrixTriangularSolve",
        lambda a, b: tf.linalg.triangular_solve(a + 3 * tf.eye(2), b),
        floats("bdd", "bdc"),
        "b",
        letters="bc",
    ),
]
_EVERY = "every example with every other"


def _einsum(equation: str, splits: str, refuses: str = "") -> Case:
    axes = equation.split("->")[0].split(",")
    return Case(
        "Einsum",
        lambda *values: tf.einsum(equation, *values),
        floats(*axes),
        splits,
        dict.fromkeys(refuses, "the diagonal"),
        note=equation,
    )


_PRODUCTS = [
    Case("MatMul", tf.matmul, floats("ab", "bc"), "abc"),
    Case("MatMul", tf.matmul, ints("ab", "bc"), "abc", note="ints"),
    Case(
        "MatMul",
        lambda a, b: tf.matmul(a, b, True, True),
        floats("ba", "cb"),
        "abc",
        note="transposed",
    ),
    Case(
        "MatMul",
        lambda a: tf.matmul(a, a, transpose_b=True),
        floats("ab"),
        "b",
        {"a": _EVERY},
        note="itself",
    ),
    Case("BatchMatMulV2", tf.matmul, floats("dab", "dbc"), "abcd"),
    Case("BatchMatMulV2", tf.matmul, floats("dab", "1bc"), "abcd", note="wide"),
    Case(
        "BatchMatMulV2", tf.matmul, floats("edab", "bc"), "abcde", note="less"
    ),
    Case(
        "BatchMatMulV2",
        lambda a, b: tf.matmul(a, b, adjoint_a=True),
        floats("dba", "dbc", dtype="complex64"),
        "abcd",
        note="adjoint",
    ),
    Case(
        "BatchMatMul", raw("BatchMatMul", "x y"), floats("dab", "dbc"), "abcd"
    ),
    Case(
        "BatchMatMulV3",
        raw("BatchMatMulV3", "x y", Tout=tf.float32),
        floats("dab", "dbc"),
        "abcd",
    ),
    _einsum("ab,bc->ac", "abc"),
    _einsum("abc,cd->abd", "abcd"),
    _einsum("abc,acd->abd", "abcd"),
    _einsum("ab,ac->abc", "abc"),
    _einsum("ab,ab->a", "ab"),
    _einsum("ab->b", "ab"),
    _einsum("abc->cab", "abc"),
    Case(
        "Einsum",
        lambda a, b: tf.einsum("...b,bc->...c", a, b),
        floats("dab", "bc"),
        "abcd",
        note="dots",
    ),
    Case(
        "Einsum",
        lambda a, b: tf.einsum("aab,bc->ac", a, b),
        floats("aab", "bc"),
        letters="bc",
        note="diagonal",
    ),
]
CASES = [*_MATRICES, *_PRODUCTS]
