"""Operations on single entries."""

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


def _gradient(
    name: str, low: float = -1, high: float = 1, keys: str = "x y"
) -> Case:
    args = floats("ab", "ab", low=low, high=high)
    return Case(name, raw(name, keys), args, "ab")


def _truths(name: str, *keys: str) -> Case:
    args = [Arg("ab", "bool")] * len(keys)
    function = raw(name, " ".join(keys))
    return Case(name, function, args, "ab", broadcast=True)


def _text(name: str, key: str = "input", **attributes: Any) -> Case:
    function = raw(name, key, **attributes)
    return Case(name, function, [Arg("ab", "string")], "ab", broadcast=True)


_ANY = [
    "Exp",
    "Expm1",
    "Tanh",
    "Sigmoid",
    "Sin",
    "Cos",
    "Sinh",
    "Cosh",
    "Asinh",
    "Atan",
    "Erf",
    "Erfc",
    "Floor",
    "Ceil",
    "Round",
    "Rint",
    "IsFinite",
    "IsNan",
    "IsInf",
    "BesselI0e",
    "BesselI1e",
    "Abs",
    "Sign",
    "Square",
    "Tan",
]
_ABOVE_ZERO = [
    "Log",
    "Log1p",
    "Lgamma",
    "Digamma",
    "Sqrt",
    "Rsqrt",
    "Reciprocal",
    "Inv",
    "BesselI0",
    "BesselI1",
]
_ACTIVATIONS = [
    "Softplus",
    "Softsign",
    "Elu",
    "Selu",
    "Relu",
    "Relu6",
    "LeakyRelu",
]
_UNARY = [
    *map(unary, _ANY),
    *(unary(name, key="features") for name in _ACTIVATIONS),
    *(unary(name, 0.2, 2) for name in _ABOVE_ZERO),
    *(unary(name, -0.9, 0.9) for name in ["Asin", "Acos", "Atanh", "Erfinv"]),
    unary("Ndtri", 0.1, 0.9),
    unary("Acosh", 1.1, 3),
]
_BINARY = [
    *map(binary, ["Maximum", "Minimum", "SquaredDifference"]),
    *map(binary, ["Less", "LessEqual", "Greater", "GreaterEqual"]),
    *map(binary, ["Equal", "NotEqual"]),
    binary("Atan2", keys="y x"),
    *(binary(n, 0.3, 2) for n in ["Pow"]),
    *(binary(n, 0.3, 2) for n in ["Xlogy", "Xlog1py", "FloorDiv", "FloorMod"]),
    binary("Igamma", 0.3, 2, "a x"),
    binary("Igammac", 0.3, 2, "a x"),
    binary("Polygamma", 1, 1, "a x"),
    binary("Zeta", 1.5, 2, "x q"),
    binary("NextAfter", keys="x1 x2"),
]
_INTS = [
    *(of_ints(n, "x", "y") for n in ["Maximum", "Minimum"]),
    *(of_ints(n, "x", "y") for n in ["FloorDiv", "FloorMod", "Mod"]),
    *(of_ints(n, "x", "y") for n in ["TruncateDiv", "TruncateMod"]),
    *(of_ints(n, "x", "y") for n in ["BitwiseAnd", "BitwiseOr", "BitwiseXor"]),
    *(of_ints(n, "x", "y", high=3) for n in ("LeftShift", "RightShift", "Pow")),
    *(of_ints(n, "x") for n in ("Invert", "PopulationCount")),
    *(of_ints(n, "x") for n in ("Square", "Abs", "Neg")),
]
_LOGIC = [
    _truths("LogicalNot", "x"),
    _truths("LogicalAnd", "x", "y"),
    _truths("LogicalOr", "x", "y"),
]
_GRADIENTS = [
    _gradient("ReluGrad", keys="gradients features"),
    _gradient("LeakyReluGrad", keys="gradients features"),
    _gradient("Relu6Grad", keys="gradients features"),
    _gradient("EluGrad", keys="gradients outputs"),
    _gradient("SeluGrad", keys="gradients outputs"),
    _gradient("SoftplusGrad", keys="gradients features"),
    _gradient("SoftsignGrad", keys="gradients features"),
    *(_gradient(n, 0.2, 0.9, "y dy") for n in ("TanhGrad", "SigmoidGrad")),
    *(_gradient(n, 0.2, 0.9, "y dy") for n in ("SqrtGrad", "RsqrtGrad")),
    *(_gradient(n, 0.2, 0.9, "y dy") for n in ("ReciprocalGrad", "InvGrad")),
]
_TEXTS = [
    _text("StringLower"),
    _text("StringUpper"),
    _text("StringStrip"),
    _text("StringLength"),
    _text("StaticRegexReplace", pattern="a", rewrite="b"),
    _text("StaticRegexFullMatch", pattern="a.*"),
    _text("StringToHashBucketFast", num_buckets=7),
    _text("StringToHashBucket", "string_tensor", num_buckets=7),
    _text("EncodeBase64"),
    Case(
        "DecodeBase64",
        lambda x: tf.io.decode_base64(tf.io.encode_base64(x)),
        [Arg("ab", "string")],
        "ab",
    ),
    _text(
        "UnicodeTranscode", input_encoding="UTF-8", output_encoding="UTF-16-BE"
    ),
    _text("RegexReplace", pattern="a", rewrite="b"),
    _text("RegexFullMatch", pattern="a.*"),
    _text("Substr", pos=0, len=1),
    Case(
        "StringToHashBucketStrong",
        lambda x: tf.strings.to_hash_bucket_strong(x, 7, [1, 2]),
        [Arg("ab", "string")],
        "ab",
    ),
    Case(
        "StringJoin",
        lambda x, y: tf.strings.join([x, y]),
        [Arg("ab", "string")] * 2,
        "ab",
    ),
    Case("AsString", tf.strings.as_string, floats("ab"), "ab"),
    Case(
        "StringToNumber",
        lambda x: tf.strings.to_number(tf.strings.as_string(x)),
        floats("ab"),
        "ab",
    ),
]


_OTHERS = [
    Case(
        "ApproximateEqual",
        raw("ApproximateEqual", "x y"),
        floats("ab", "ab"),
        "ab",
    ),
    Case("Relu", tf.nn.relu, ints("ab", low=-3), "ab", note="ints"),
    Case("ComplexAbs", tf.abs, floats("ab", dtype="complex64"), "ab"),
    Case("Angle", tf.math.angle, floats("ab", dtype="complex64"), "ab"),
    *(
        Case(n, raw(n, "input"), floats("ab", dtype="complex64"), "ab")
        for n in ("Real", "Imag", "Conj")
    ),
    Case("Complex", tf.complex, floats("ab", "ab"), "ab"),
    Case(
        "ClipByValue",
        raw("ClipByValue", "t clip_value_min clip_value_max"),
        floats("ab", "", ""),
        "ab",
    ),
    Case(
        "Betainc",
        raw("Betainc", "a b x"),
        floats("ab", "ab", "ab", low=0.1),
        "ab",
    ),
    Case(
        "Bucketize",
        lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[0.0, 0.3]),
        floats("ab"),
        "ab",
    ),
    Case("Bitcast", lambda x: tf.bitcast(x, tf.int32), floats("ab"), "ab"),
    Case(
        "Bitcast",
        lambda x: tf.bitcast(x, tf.int32),
        floats("ab", dtype="float64"),
        note="halves",
    ),
    *(
        Case(
            "Pow",
            lambda x, e=e: x**e,
            floats("ab", low=0.1, high=2),
            "ab",
            note=str(e),
        )
        for e in (0, 1, 2, 3, -1, -2, 0.5, 0.123, 1e-3)
    ),
    *(
        Case(
            "Maximum",
            lambda x, c=c: tf.maximum(x, c),
            floats("ab"),
            "ab",
            note=str(c),
        )
        for c in (0.0, 1.0, -1.0)
    ),
]


def _choose(condition: Any, a: Any, b: Any) -> Any:
    return tf.raw_ops.SelectV2(condition=condition, t=a, e=b)


_ARITHMETIC = [
    *map(binary, ["Sub", "Add", "AddV2", "Mul", "MulNoNan"]),
    *(binary(n, 0.3, 2) for n in ["RealDiv", "Div", "DivNoNan", "Xdivy"]),
    *(of_ints(n, "x", "y") for n in ["AddV2", "Sub", "Mul", "Div"]),
]
_SAME = [
    *(unary(n) for n in ["Neg", "DeepCopy"]),
    *(unary(n, key="input") for n in ["Snapshot", "Identity", "StopGradient"]),
]
_CHOICES = [
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
CASES = [
    *(*_ARITHMETIC, *_SAME, *_CHOICES, *_UNARY, *_BINARY, *_INTS),
    *(*_LOGIC, *_GRADIENTS, *_TEXTS, *_OTHERS),
]
