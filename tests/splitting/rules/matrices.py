"""Operations on matrices, and along vectors."""

import functools

import tensorflow as tf

from tests.splitting.rules.case import cases

_MATRIX = "of a matrix of examples"
_DIAGONALS = {"k": 0, "num_rows": -1, "num_cols": -1}


def _invertible(function):
    return lambda x: function(tf.matmul(x, x, transpose_b=True) + tf.eye(2))


_square = functools.partial(cases, "bdd -> b only")
_any = functools.partial(cases, "bcd -> b only")
_MATRICES = [
    *cases(
        "abc -> a",
        {"MatrixBandPart": {"num_lower": 0, "num_upper": 1}},
        refuses={"b": _MATRIX},
    ),
    *cases("abc -> ab", "MatrixDiag", refuses={"c": _MATRIX}),
    *cases("abc -> a", "MatrixDiagPart", refuses={"b": _MATRIX}),
    *cases("abc, - -> -", "MatrixDiagV2 MatrixDiagV3", _DIAGONALS),
    *cases("abc, - -> -", "MatrixDiagPartV2 MatrixDiagPartV3", {"k": 0}),
    *cases("abc -> ab", {"MatrixDiagV3-zero": tf.linalg.diag}),
    *cases("abc -> a", {"MatrixDiagPartV3-zero": tf.linalg.diag_part}),
    *cases("abc, ab -> a", "MatrixSetDiag"),
    *cases("abc, ab -> a", "MatrixSetDiagV2 MatrixSetDiagV3", {"k": 0}),
    *cases("abc:complex64 -> ab", "FFT IFFT", refuses={"c": _MATRIX}),
    *cases("abc:complex64 -> a", "FFT2D IFFT2D", refuses={"b": _MATRIX}),
    *cases("abcd:complex64 -> a", "FFT3D IFFT3D", refuses={"b": _MATRIX}),
    *cases("abc -> ab", "RFFT", {"fft_length": [4]}),
    *cases("abb:complex64 -> a only", "IRFFT", {"fft_length": [4]}),
    *cases("acc -> a only", "RFFT2D", {"fft_length": [4, 4]}),
    *cases("acb:complex64 -> a only", "IRFFT2D", {"fft_length": [4, 4]}),
    *_any({"Qr": tf.linalg.qr, "Svd": tf.linalg.svd}),
    *_square(
        {
            "MatrixInverse": _invertible(tf.linalg.inv),
            "Cholesky": _invertible(tf.linalg.cholesky),
            "SelfAdjointEigV2": lambda x: tf.linalg.eigh(
                x + tf.linalg.matrix_transpose(x)
            ),
            "MatrixDeterminant": tf.linalg.det,
            "LogMatrixDeterminant": _invertible(tf.linalg.slogdet),
            "Lu": _invertible(tf.linalg.lu),
            "MatrixSquareRoot": _invertible(tf.linalg.sqrtm),
        }
    ),
    *cases(
        "add, adb -> a only ab",
        {"MatrixSolve": lambda a, b: tf.linalg.solve(a + 3 * tf.eye(2), b)},
    ),
    *cases(
        "bdd, bdc -> b only bc",
        {
            "MatrixTriangularSolve": lambda a, b: tf.linalg.triangular_solve(
                a + 3 * tf.eye(2), b
            )
        },
    ),
]


def _einsum(equation, splits):
    def apply(*values):
        return tf.einsum(equation, *values)

    args = equation.split("->")[0].replace(",", ", ")
    return cases(f"{args} -> {splits}", {f"Einsum-{equation}": apply})


_FLIPPED = {"transpose_a": True, "transpose_b": True}
_PRODUCTS = [
    *cases("ab, bc -> abc", "MatMul"),
    *cases("ab:whole, bc:whole -> abc", "MatMul"),
    *cases("ba, cb -> abc", {"MatMul-transposed": _FLIPPED}),
    *cases(
        "ab -> b",
        {"MatMul-itself": lambda a: tf.matmul(a, a, transpose_b=True)},
        refuses={"a": "every example with every other"},
    ),
    *cases("dab, dbc -> abcd", "BatchMatMul BatchMatMulV2"),
    *cases("dab, dbc -> abcd", "BatchMatMulV3", {"Tout": tf.float32}),
    *cases("dab, 1bc -> abcd", {"BatchMatMulV2-wide": {}}),
    *cases("edab, bc -> abcde", {"BatchMatMulV2-less": {}}),
    *cases(
        "dba:complex64, dbc:complex64 -> abcd",
        {"BatchMatMulV2-adjoint": {"adj_x": True}},
    ),
    *(*_einsum("ab,bc->ac", "abc"), *_einsum("abc,cd->abd", "abcd")),
    *(*_einsum("abc,acd->abd", "abcd"), *_einsum("ab,ac->abc", "abc")),
    *(*_einsum("ab,ab->a", "ab"), *_einsum("ab->b", "ab")),
    *_einsum("abc->cab", "abc"),
    *cases(
        "dab, bc -> abcd",
        {"Einsum-dots": lambda a, b: tf.einsum("...b,bc->...c", a, b)},
    ),
    *cases(
        "aab, bc -> - only bc",
        {"Einsum-diagonal": lambda a, b: tf.einsum("aab,bc->ac", a, b)},
    ),
]
CASES = [*_MATRICES, *_PRODUCTS]
