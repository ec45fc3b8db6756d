"""Adding, multiplying and choosing."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.splitting.layouts import Arg
from tests.splitting.rules.case import (
    Case,
    binary,
    floats,
    ints,
    of_ints,
    raw,
    unary,
)


def _choose(condition: Any, a: Any, b: Any) -> Any:
    return tf.raw_ops.SelectV2(condition=condition, t=a, e=b)


_PAIRS = [
    *map(binary, ["Sub", "Add", "AddV2", "Mul", "MulNoNan"]),
    *(binary(n, 0.3, 2) for n in ["RealDiv", "Div", "DivNoNan", "Xdivy"]),
    *(of_ints(n, "x", "y") for n in ["AddV2", "Sub", "Mul", "Div"]),
]
_SAME = [
    *(unary(n) for n in ["Neg", "DeepCopy"]),
    *(unary(n, key="input") for n in ["Snapshot", "Identity", "StopGradient"]),
]
_OTHERS = [
    Case(
        "SelectV2",
        _choose,
        [Arg("ab", "bool"), *floats("ab", "ab")],
        "ab",
        broadcast=True,
    ),
    Case(
        "SelectV2",
        _choose,
        [Arg("ab", "bool"), *ints("ab", "ab")],
        "ab",
        broadcast=True,
        note="ints",
    ),
    Case(
        "Select",
        raw("Select", "condition x y"),
        [Arg("ab", "bool"), *floats("ab", "ab")],
        "ab",
    ),
    Case(
        "Select",
        raw("Select", "condition x y"),
        [Arg("a", "bool"), *floats("ab", "ab")],
        note="rows",
    ),
    Case(
        "PreventGradient", raw("PreventGradient", "input"), floats("ab"), "ab"
    ),
    Case(
        "CheckNumerics",
        lambda x: tf.debugging.check_numerics(x, "?"),
        floats("ab", scales=False),
        "ab",
    ),
    Case(
        "CheckNumericsV2",
        lambda x: tf.raw_ops.CheckNumericsV2(tensor=x, message="?"),
        floats("ab", scales=False),
        "ab",
    ),
    Case(
        "PlaceholderWithDefault",
        lambda x: tf.compat.v1.placeholder_with_default(x, x.shape),
        floats("ab"),
        "ab",
    ),
    Case(
        "IdentityN",
        lambda x, y: tf.identity_n([x, y]),
        floats("ab", "ab"),
        "ab",
    ),
    Case("AddN", lambda x, y: tf.add_n([x, y, x]), floats("ab", "ab"), "ab"),
    Case(
        "AccumulateNV2",
        lambda x, y: tf.raw_ops.AccumulateNV2(inputs=[x, y], shape=[2, 3]),
        floats("ab", "ab"),
        letters="",
    ),
    Case("BiasAdd", tf.nn.bias_add, floats("abc", "c"), "ab"),
    Case(
        "BiasAdd",
        lambda x, b: tf.nn.bias_add(x, b, "NC..."),
        floats("abc", "b"),
        "ac",
        note="first",
    ),
    Case("BiasAddV1", raw("BiasAddV1", "value bias"), floats("abc", "c"), "ab"),
    *(
        Case(
            "Cast",
            lambda x, to=to: tf.cast(x, to),
            args,
            "ab",
            note=f"{args[0].dtype}-{to}",
        )
        for to, args in (
            ("float64", floats("ab")),
            ("int32", floats("ab", low=-9, high=9)),
            ("bool", floats("ab")),
            ("float32", ints("ab")),
            ("float32", [Arg("ab", "bool")]),
            ("int64", ints("ab", low=-5)),
            ("uint8", ints("ab", low=-200, high=200)),
            ("complex64", floats("ab")),
            ("float32", floats("ab", dtype="complex64")),
        )
    ),
    Case(
        "EnsureShape", lambda x: tf.ensure_shape(x, x.shape), floats("ab"), "ab"
    ),
    Case(
        "DebugIdentityV2", raw("DebugIdentityV2", "input"), floats("ab"), "ab"
    ),
    Case("Copy", raw("Copy", "input"), floats("ab"), "ab"),
]
CASES = [*_PAIRS, *_SAME, *_OTHERS]
