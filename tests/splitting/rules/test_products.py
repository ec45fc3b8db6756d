"""Products which sum over axes."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.kit.long import some_of
from tests.splitting.rules.case import Case, exercise, floats, ints, raw

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


CASES = [
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


@pytest.mark.parametrize("case", some_of(CASES), ids=str)
def test_case(case):
    exercise(case)
