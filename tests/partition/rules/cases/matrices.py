"""Operations on matrices, and along vectors."""

import functools

import tensorflow as tf

from tests.partition.rules.cases.case import cases

_DIAGONALS = {"k": 0, "num_rows": -1, "num_cols": -1}


def _invertible(function):
    return lambda x: function(tf.matmul(x, x, transpose_b=True) + tf.eye(2))


def _searched(x, y, side):
    return getattr(tf.raw_ops, f"{side}Bound")(
        sorted_inputs=tf.sort(x), values=y, out_type=tf.int32
    )


_square = functools.partial(cases, "bdd")
_any = functools.partial(cases, "bcd")
_MATRICES = [
    *cases("abc", {"MatrixBandPart": {"num_lower": 0, "num_upper": 1}}),
    *cases("abc", "MatrixDiag"),
    *cases("abc", "MatrixDiagPart"),
    *cases("abc, -", "MatrixDiagV2 MatrixDiagV3", _DIAGONALS),
    *cases("abc, -", {"MatrixDiagV3-several": {**_DIAGONALS, "k": [-1, 1]}}),
    *cases("abc, -", "MatrixDiagPartV2 MatrixDiagPartV3", {"k": 0}),
    *cases(
        "ab, ac",
        {
            f"{side}Bound": functools.partial(_searched, side=side)
            for side in ("Lower", "Upper")
        },
    ),
    *cases("abc", {"MatrixDiagV3-zero": tf.linalg.diag}),
    *cases("abc", {"MatrixDiagPartV3-zero": tf.linalg.diag_part}),
    *cases("abc, ab", "MatrixSetDiag"),
    *cases("abc, ab", "MatrixSetDiagV2 MatrixSetDiagV3", {"k": 0}),
    *cases("abc:complex64", "FFT IFFT"),
    *cases("abc:complex64", "FFT2D IFFT2D"),
    *cases("abcd:complex64", "FFT3D IFFT3D"),
    *cases("abc", "RFFT", {"fft_length": [4]}),
    *cases("abb:complex64", "IRFFT", {"fft_length": [4]}),
    *cases("acc", "RFFT2D", {"fft_length": [4, 4]}),
    *cases("acb:complex64", "IRFFT2D", {"fft_length": [4, 4]}),
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
        "add, adb",
        {"MatrixSolve": lambda a, b: tf.linalg.solve(a + 3 * tf.eye(2), b)},
    ),
    *cases(
        "bdd, bdc",
        {
            "MatrixTriangularSolve": lambda a, b: tf.linalg.triangular_solve(
                a + 3 * tf.eye(2), b
            )
        },
    ),
]


def _einsum(equation):
    def apply(*values):
        return tf.einsum(equation, *values)

    args = equation.split("->")[0].replace(",", ", ")
    return cases(args, {f"Einsum-{equation}": apply})


_FLIPPED = {"transpose_a": True, "transpose_b": True}
_PRODUCTS = [
    *cases("ab, bc", "MatMul"),
    *cases("ab:whole, bc:whole", "MatMul"),
    *cases("ba, cb", {"MatMul-transposed": _FLIPPED}),
    *cases(
        "ab", {"MatMul-itself": lambda a: tf.matmul(a, a, transpose_b=True)}
    ),
    *cases("dab, dbc", "BatchMatMul BatchMatMulV2"),
    *cases("dab, dbc", "BatchMatMulV3", {"Tout": tf.float32}),
    *cases("dab, 1bc", {"BatchMatMulV2-wide": {}}),
    *cases("edab, bc", {"BatchMatMulV2-less": {}}),
    *cases(
        "dba:complex64, dbc:complex64",
        {"BatchMatMulV2-adjoint": {"adj_x": True}},
    ),
    *(*_einsum("ab,bc->ac"), *_einsum("abc,cd->abd")),
    *(*_einsum("abc,acd->abd"), *_einsum("ab,ac->abc")),
    *(*_einsum("ab,ab->a"), *_einsum("ab->b")),
    *_einsum("abc->cab"),
    *cases(
        "dab, bc",
        {"Einsum-dots": lambda a, b: tf.einsum("...b,bc->...c", a, b)},
    ),
    *cases(
        "aab, bc",
        {"Einsum-diagonal": lambda a, b: tf.einsum("aab,bc->ac", a, b)},
    ),
]
CASES = [*_MATRICES, *_PRODUCTS]
