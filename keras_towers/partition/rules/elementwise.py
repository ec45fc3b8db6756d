"""Elementwise operations: arithmetic, choices and functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.partition.division import Factors, divide, elementwise
from keras_towers.partition.layouts import Value, Values, local_shape
from keras_towers.partition.nodes import Node
from keras_towers.partition.reasons import EXCHANGE, require, unless_none
from keras_towers.partition.registry import axes, rule
from keras_towers.partition.sizes import Dimension
from keras_towers.partition.units import Units

Linear: TypeAlias = "Sequence[Collection[int]]"

_NUMERIC = """
    Exp Expm1 Log Log1p Sigmoid Softplus Softsign Elu Selu Relu Relu6 LeakyRelu
    Floor Ceil Round Rint Sin Cos Tan Asin Acos Atan Atan2 Sinh Cosh Tanh Asinh
    Acosh Atanh Erf Erfc Erfinv Ndtri Lgamma Digamma Polygamma Igamma Igammac
    IgammaGradA Betainc Zeta NextAfter BesselI0 BesselI0e BesselI1 BesselI1e
    Bucketize Square Sqrt Rsqrt Reciprocal Inv Abs ComplexAbs Sign Angle Complex
    Mod FloorMod FloorDiv TruncateDiv TruncateMod Maximum Minimum ClipByValue
    SquaredDifference Xlogy Xlog1py Xdivy Pow SqrtGrad
"""
_PREDICATES = """
    IsFinite IsNan IsInf LogicalNot LogicalAnd LogicalOr Less LessEqual Greater
    GreaterEqual Equal NotEqual ApproximateEqual
"""
_BITS = """
    Invert BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift PopulationCount
"""
_TEXTS = """
    RegexReplace StaticRegexReplace RegexFullMatch StaticRegexFullMatch
    StringLower StringUpper StringStrip StringLength StringJoin StringToNumber
    AsString Substr StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong DecodeBase64 EncodeBase64 UnicodeTranscode
"""
# If the check fails on one tower, the step stops on all of them.
_CHECKS = "CheckNumerics CheckNumericsV2"
_LINEAR_UNARY = """
    PreventGradient DeepCopy Copy DebugIdentityV2 Neg Real Imag Conj ZerosLike
"""
# Their first input is the gradient.
_GRADIENT_FIRST = """
    ReluGrad LeakyReluGrad Relu6Grad EluGrad SeluGrad SoftplusGrad SoftsignGrad
"""
# Their second input is the gradient.
_GRADIENT_SECOND = """
    TanhGrad SigmoidGrad RsqrtGrad ReciprocalGrad InvGrad
"""
_NOT_LINEAR = f"{_NUMERIC} {_PREDICATES} {_BITS} {_TEXTS} {_CHECKS} OnesLike"
# The groups of inputs in which they are linear.
_LINEAR: dict[str, Linear] = {
    **dict.fromkeys(_NOT_LINEAR.split(), ()),
    **dict.fromkeys(_LINEAR_UNARY.split(), [[0]]),
    **dict.fromkeys(_GRADIENT_FIRST.split(), [[0]]),
    **dict.fromkeys(_GRADIENT_SECOND.split(), [[1]]),
    **dict.fromkeys(("AddV2", "Add", "Sub"), [[0, 1]]),
    "Mul": [[0], [1]],
    # It is not linear in the second input: terms that are not 0 may add up to
    # 0.
    "MulNoNan": [[0]],
    "SelectV2": [[1, 2]],
}


ELEMENTWISE: frozenset[str] = frozenset(
    (*_LINEAR, "AddN", "BiasAdd", "BiasAddV1", "DivNoNan", "RealDiv")
)
"""The operations of which an entry of the result needs one of each input."""


@axes(*_LINEAR)
def _elementwise(node: Node, *inputs: Value) -> Factors:
    return elementwise(inputs, _LINEAR[node.type])


@axes("AddN")
def _add_n(node: Node, *inputs: Value) -> Factors:
    return elementwise(inputs, [range(len(inputs))])


@axes("RealDiv", "Div", "DivNoNan")
def _division(node: Node, *inputs: Value) -> Factors:
    return elementwise(inputs, [[0]] if node.dtype(0).is_floating else ())


@axes("Cast")
def _cast(node: Node, value: Value) -> Factors:
    before, after = node.dtype(0), node.output_dtype()
    # Sums must be rounded once, not each term.
    is_exact = before.is_floating and after.is_floating
    is_exact = is_exact and (before == after or before.size < after.size)
    return elementwise([value], [[0]] if is_exact else ())


@axes("Bitcast")
def _bitcast(node: Node, value: Value) -> Factors:
    require(node.shapes[0].rank == value.rank)
    return elementwise([value])


@axes("BiasAdd", "BiasAddV1")
def _bias_add(node: Node, value: Value, bias: Value) -> Factors:
    is_v1 = node.type == "BiasAddV1"
    channels_first = not is_v1 and node.attr("data_format") == b"NCHW"
    channels = 1 if channels_first else value.rank - 1
    whole = range(value.rank)
    return Factors([whole, [channels]], [whole], linear=[[0, 1]])


@axes("Select")
def _select(node: Node, *inputs: Value) -> Factors:
    whole = range(inputs[1].rank)
    chosen = whole[: inputs[0].rank]
    return Factors([chosen, whole, whole], [whole], linear=[[1, 2]])


@axes("EnsureShape", "PlaceholderWithDefault")
def _ensure_shape(node: Node, value: Value) -> Factors:
    labels, attributes = range(value.rank), {}
    if value.sharded is not None:
        # The attribute has the global number of rows.
        shape = local_shape(tf.TensorShape(node.attr("shape")), value.layout)
        attributes["shape"] = shape
    return Factors([labels], [labels], linear=[[0]], attributes=attributes)


@rule("EnsureShape")
def _ensure_rows(node: Node, value: Value) -> Values:
    """Check the number of all towers' rows, too."""
    layout, _ = value.as_rows()
    rows = tf.TensorShape(node.attr("shape"))[layout.axis]
    if rows is not None and rows != layout.size:
        _assert_rows(node.units, layout.size, rows)
    return divide(node, [value], _ensure_shape(node, value))


def _assert_rows(units: Units, size: Dimension, rows: int) -> None:
    """Assert that a global size is a number of rows."""
    builder = units.builder
    require(builder.can_exchange, EXCHANGE)
    total = unless_none(units.global_size(size))
    is_equal = builder.op("Equal", [total, rows], ())
    text = f"{rows} rows are expected by {builder.name}, not"
    (message,) = builder.add(
        "Const",
        (),
        {"dtype": tf.string, "value": np.array(text, object)},
        [(tf.string, tf.TensorShape(()))],
    )
    builder.add(
        "Assert",
        [is_equal, message, total],
        {"T": [message.dtype, total.dtype]},
        (),
        has_effect=True,
    )


@rule("Identity", "IdentityN", "StopGradient", "Snapshot")
def _identity(node: Node, *inputs: Value) -> Values:
    return list(inputs)
