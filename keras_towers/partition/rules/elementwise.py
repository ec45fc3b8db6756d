"""Operations on single entries: arithmetic, choices and functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers.partition.builder import AttrValue
from keras_towers.partition.conversions import local_shape
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import axes, rule

Linear: TypeAlias = "Sequence[frozenset[int]]"

_NUMBERS = """
    Exp Expm1 Log Log1p Sigmoid Softplus Softsign Elu Selu Relu Relu6 LeakyRelu
    Floor Ceil Round Rint Sin Cos Tan Asin Acos Atan Atan2 Sinh Cosh Tanh Asinh
    Acosh Atanh Erf Erfc Erfinv Ndtri Lgamma Digamma Polygamma Igamma Igammac
    IgammaGradA Betainc Zeta NextAfter BesselI0 BesselI0e BesselI1 BesselI1e
    Bucketize Square Sqrt Rsqrt Reciprocal Inv Abs ComplexAbs Sign Angle Complex
    Mod FloorMod FloorDiv TruncateDiv TruncateMod Maximum Minimum ClipByValue
    SquaredDifference Xlogy Xlog1py Xdivy Pow
"""
_TRUTHS = """
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
# Linear in the gradient, which is their first or second input.
_GRADIENTS = {
    **dict.fromkeys(("ReluGrad", "LeakyReluGrad", "Relu6Grad"), 0),
    **dict.fromkeys(("EluGrad", "SeluGrad", "SoftplusGrad"), 0),
    **dict.fromkeys(("SoftsignGrad",), 0),
    **dict.fromkeys(("TanhGrad", "SigmoidGrad", "SqrtGrad", "RsqrtGrad"), 1),
    **dict.fromkeys(("ReciprocalGrad", "InvGrad"), 1),
}
_COPIES = """
    PreventGradient DeepCopy Copy DebugIdentityV2 Neg Real Imag Conj
"""
_SUMS = "AddV2 Add Sub AddN"
_QUOTIENTS = "RealDiv Div DivNoNan"

_FIRST = (frozenset({0}),)


def broadcast(node: Node, linear: Linear = ()) -> Factors | None:
    """Return the axes of an operation whose inputs are broadcast."""
    ranks = [node.rank(k) for k in range(node.num_inputs)]
    if None in ranks:
        return None
    whole = tuple(range(max(rank or 0 for rank in ranks)))
    rank = len(whole)
    labels = [whole[rank - own :] if own else () for own in ranks]
    return Factors(labels, [whole] * node.num_outputs, linear=linear)


@axes(*f"{_NUMBERS} {_TRUTHS} {_BITS} {_TEXTS}".split())
def _function(node: Node, *inputs: Value) -> Factors | None:
    return broadcast(node)


@axes(*_COPIES.split())
def _copy(node: Node, value: Value) -> Factors | None:
    return broadcast(node, _FIRST)


@axes("CheckNumerics", "CheckNumericsV2")
def _checked(node: Node, value: Value) -> Factors | None:
    # Whoever finds what is not finite, all stop.
    return broadcast(node)


@axes("ZerosLike")
def _zeros(node: Node, value: Value) -> Factors | None:
    return broadcast(node, _FIRST)


@axes(*_GRADIENTS)
def _gradient(node: Node, *inputs: Value) -> Factors | None:
    return broadcast(node, (frozenset({_GRADIENTS[node.type]}),))


@axes("Cast")
def _cast(node: Node, value: Value) -> Factors | None:
    before, after = node.dtype(0), node.output_dtype(0)
    # Sums that are rounded are rounded once.
    wider = before.is_floating and after.is_floating
    wider = wider and after.size >= before.size
    return broadcast(node, _FIRST if wider else ())


@axes("Bitcast")
def _other_type(node: Node, value: Value) -> Factors | None:
    if node.rank(0) != node.output_rank():
        return None
    return broadcast(node)


@axes(*_SUMS.split())
def _sum(node: Node, *inputs: Value) -> Factors | None:
    return broadcast(node, (frozenset(range(len(inputs))),))


@axes("Mul")
def _product(node: Node, *inputs: Value) -> Factors | None:
    return broadcast(node, (frozenset({0}), frozenset({1})))


@axes("MulNoNan")
def _product_or_zero(node: Node, *inputs: Value) -> Factors | None:
    # Parts that are not zero may have a sum that is.
    return broadcast(node, _FIRST)


@axes(*_QUOTIENTS.split())
def _quotient(node: Node, *inputs: Value) -> Factors | None:
    linear = _FIRST if node.dtype(0).is_floating else ()
    return broadcast(node, linear)


@axes("BiasAdd", "BiasAddV1")
def _bias(node: Node, value: Value, bias: Value) -> Factors | None:
    rank = node.rank(0)
    if rank is None:
        return None
    whole = tuple(range(rank))
    first = node.type == "BiasAdd" and node.attr("data_format") == b"NCHW"
    at = 1 if first else rank - 1
    return Factors([whole, (at,)], [whole], linear=(frozenset({0, 1}),))


@axes("SelectV2")
def _choice(node: Node, *inputs: Value) -> Factors | None:
    return broadcast(node, (frozenset({1, 2}),))


@axes("Select")
def _choice_of_rows(node: Node, *inputs: Value) -> Factors | None:
    rank = node.rank(1)
    if rank is None or node.rank(0) is None:
        return None
    whole = tuple(range(rank))
    chosen = whole[: node.rank(0)]
    return Factors([chosen, whole, whole], [whole], linear=(frozenset({1, 2}),))


@axes("EnsureShape", "PlaceholderWithDefault")
def _shaped_axes(node: Node, value: Value) -> Factors | None:
    return broadcast(node, _FIRST)


@rule("EnsureShape", "PlaceholderWithDefault")
def _shaped(
    partition: Partitioner, node: Node, value: Value
) -> list[Value] | None:
    factors, layout = _shaped_axes(node, value), value.sharded
    if factors is None:
        return None
    if layout is not None:
        # The number of rows that one device has is not that of a tower.
        shape = local_shape(tf.TensorShape(node.attr("shape")), layout)
        factors.attributes["shape"] = AttrValue(shape=shape.as_proto())
    return partition.divided(node, [value], factors)


@rule("Identity", "IdentityN", "StopGradient", "Snapshot", always=True)
def _same(partition: Any, node: Node, *inputs: Value) -> list[Value]:
    return list(inputs)
