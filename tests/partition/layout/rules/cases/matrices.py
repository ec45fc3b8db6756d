"""Operations on matrices, and along vectors."""

import functools

import numpy as np
import tensorflow as tf

from tests.partition.layout.rules.cases.case import cases_of

_DIAGONALS = {"k": 0, "num_rows": -1, "num_cols": -1}


def _invertible(function):
    return lambda x: function(tf.matmul(x, x, transpose_b=True) + tf.eye(2))


def _searched(x, y, side):
    return getattr(tf.raw_ops, f"{side}Bound")(
        sorted_inputs=tf.sort(x), values=y, out_type=tf.int32
    )


def _symmetric(x):
    return x + tf.linalg.matrix_transpose(x)


def _triangular(a, b, adjoint):
    return tf.linalg.triangular_solve(a + 3 * tf.eye(2), b, adjoint=adjoint)


_square = functools.partial(cases_of, "bdd")
_any = functools.partial(cases_of, "bcd")
_MATRICES = [
    *cases_of("abc", MatrixBandPart={"num_lower": 0, "num_upper": 1}),
    *cases_of("abc", "MatrixDiag"),
    *cases_of("abc", "MatrixDiagPart"),
    *cases_of("abc, -", "MatrixDiagV2 MatrixDiagV3", _DIAGONALS),
    *cases_of("abc, -", "MatrixDiagPartV2 MatrixDiagPartV3", {"k": 0}),
    *cases_of(
        "ab, ac",
        **{
            f"{side}Bound": functools.partial(_searched, side=side)
            for side in ("Lower", "Upper")
        },
    ),
    *cases_of("abc", MatrixDiagV3_zero=tf.linalg.diag),
    *cases_of(
        "aDc, -",
        MatrixDiagV2_band={**_DIAGONALS, "k": [0, 1]},
        MatrixDiagV3_band={**_DIAGONALS, "k": [0, 1]},
    ),
    *cases_of("abc", MatrixDiagPartV3_zero=tf.linalg.diag_part),
    *cases_of("abc, ab", "MatrixSetDiag"),
    *cases_of("abc, ab", "MatrixSetDiagV2 MatrixSetDiagV3", {"k": 0}),
    *cases_of("abc:complex64", "FFT IFFT"),
    *cases_of("abc:complex64", "FFT2D IFFT2D"),
    *cases_of("abcd:complex64", "FFT3D IFFT3D"),
    *cases_of("abc", "RFFT", {"fft_length": [4]}),
    *cases_of("abb:complex64", "IRFFT", {"fft_length": [4]}),
    *cases_of("acc", "RFFT2D", {"fft_length": [4, 4]}),
    *cases_of("acb:complex64", "IRFFT2D", {"fft_length": [4, 4]}),
    *_any(
        Qr=tf.linalg.qr,
        Qr_full=lambda x: tf.linalg.qr(x, full_matrices=True),
        Svd=tf.linalg.svd,
        Svd_full=lambda x: tf.linalg.svd(x, full_matrices=True),
        Svd_values=lambda x: tf.linalg.svd(x, compute_uv=False),
    ),
    *_square(
        MatrixInverse=_invertible(tf.linalg.inv),
        Cholesky=_invertible(tf.linalg.cholesky),
        MatrixInverse_adjoint=_invertible(
            lambda x: tf.linalg.inv(x, adjoint=True)
        ),
        Eig=tf.linalg.eig,
        Eig_values=tf.linalg.eigvals,
        SelfAdjointEigV2=lambda x: tf.linalg.eigh(_symmetric(x)),
        SelfAdjointEigV2_values=lambda x: tf.linalg.eigvalsh(_symmetric(x)),
        MatrixDeterminant=tf.linalg.det,
        LogMatrixDeterminant=_invertible(tf.linalg.slogdet),
        Lu=_invertible(tf.linalg.lu),
        MatrixSquareRoot=_invertible(tf.linalg.sqrtm),
    ),
    *cases_of(
        "add, adb",
        MatrixSolve=lambda a, b: tf.linalg.solve(a + 3 * tf.eye(2), b),
        MatrixSolve_adjoint=lambda a, b: tf.linalg.solve(
            a + 3 * tf.eye(2), b, adjoint=True
        ),
    ),
    *cases_of(
        "acb, acd",
        **{
            f"MatrixSolveLs_{fast}": functools.partial(
                tf.linalg.lstsq, l2_regularizer=0.1, fast=fast
            )
            for fast in (True, False)
        },
    ),
    *cases_of("ab3, ab3", "Cross"),
    *cases_of(
        "dd, bdc",
        MatrixTriangularSolve_wide=lambda a, b: _triangular(a, b, False),
    ),
    *cases_of(
        "bdd, dc",
        MatrixTriangularSolve_less=lambda a, b: _triangular(a, b, False),
    ),
    *cases_of(
        "ebdd, 1bdc",
        MatrixTriangularSolve_one=lambda a, b: _triangular(a, b, False),
    ),
    *cases_of(
        "bdd, bdc",
        **{
            f"MatrixTriangularSolve_{adjoint}": functools.partial(
                _triangular, adjoint=adjoint
            )
            for adjoint in (True, False)
        },
    ),
]


def _einsum(equation):
    def apply(*values):
        return tf.einsum(equation, *values)

    args = equation.split("->")[0].replace(",", ", ")
    return cases_of(args, **{f"Einsum_{equation}": apply})


def _with_dots(args, equation):
    """Cases of an einsum whose axes are not all named.

    ``tf.einsum`` would name them where it knows the ranks.
    """

    def apply(*values):
        return tf.raw_ops.Einsum(inputs=values, equation=equation)

    return cases_of(args, **{f"Einsum_{equation}": apply})


_FLIPPED = {"transpose_a": True, "transpose_b": True}
_PRODUCTS = [
    *cases_of("ab, bc", "MatMul"),
    *cases_of("ab:whole, bc:whole", "MatMul"),
    *cases_of("ba, cb", MatMul_transposed=_FLIPPED),
    *cases_of("ab", MatMul_itself=lambda a: tf.matmul(a, a, transpose_b=True)),
    *cases_of("dab, dbc", "BatchMatMul BatchMatMulV2"),
    *cases_of("dab, dbc", "BatchMatMulV3", {"Tout": tf.float32}),
    *cases_of("dab, 1bc", BatchMatMulV2_wide={}),
    *cases_of("edab, bc", BatchMatMulV2_less={}),
    *cases_of(
        "dba:complex64, dbc:complex64", BatchMatMulV2_adjoint={"adj_x": True}
    ),
    *(*_einsum("ab,bc->ac"), *_einsum("abc,cd->abd")),
    *(*_einsum("abc,acd->abd"), *_einsum("ab,ac->abc")),
    *(*_einsum("ab,ab->a"), *_einsum("ab->b")),
    *_einsum("abc->cab"),
    # On a tower without rows, 0 times infinity is NaN.
    *cases_of(
        "ab",
        Einsum_factor=lambda a: tf.einsum(
            "ab,c->c", a + 2, tf.constant([np.inf, 1.0])
        ),
    ),
    *_with_dots("dab, bc", "...b,bc->...c"),
    *_with_dots("abc, d", "...c,d->...cd"),
    *_with_dots("dab, 1bc", "...ab,...bc->...ac"),
    *_with_dots("ab, cab", "...b,...b->..."),
    *_with_dots("ab, c1b", "...b,...b->...b"),
    *_with_dots("abc", "a...->...a"),
    *_with_dots("ab, ac", "...b,...c->bc..."),
    *_with_dots("abc, bc", "a...c,...c->a..."),
    *cases_of(
        "aab, bc", Einsum_diagonal=lambda a, b: tf.einsum("aab,bc->ac", a, b)
    ),
]
CASES = [*_MATRICES, *_PRODUCTS]
