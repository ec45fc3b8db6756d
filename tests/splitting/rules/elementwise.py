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
    Case(
        "StringToHashBucketStrong",
        lambda x: tf.strings.to_hash_bucket_strong(x, 7, [1, 2]),
        [Arg("ab", "string")],
        "ab",
    ),
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
    Case(
        "RegexReplace",
        lambda x: tf.raw_ops.RegexReplace(input=x, pattern="a", rewrite="b"),
        [Arg("ab", "string")],
        "ab",
    ),
    Case(
        "RegexFullMatch",
        lambda x: tf.raw_ops.RegexFullMatch(input=x, pattern="a.*"),
        [Arg("ab", "string")],
        "ab",
    ),
    Case(
        "Substr",
        lambda x: tf.strings.substr(x, 0, 1),
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
CASES = [*_UNARY, *_BINARY, *_INTS, *_LOGIC, *_GRADIENTS, *_TEXTS, *_OTHERS]
