"""Operations on single entries."""

from __future__ import annotations

from collections.abc import Callable

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    aligned,
    free,
    refuse_sums,
    rule,
    shapes_together,
)
from keras_towers.splitting.sizes import Size
from keras_towers.splitting.values import (
    Degree,
    DoesNotSplit,
    Kind,
    Value,
    common,
    power,
    product,
    same,
    total,
)

# What they do to a number has nothing to do with what they do to its double.
_NONLINEAR = [
    "Exp",
    "Log",
    "Log1p",
    "Expm1",
    "Tanh",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "Elu",
    "Selu",
    "Relu6",
    "Sin",
    "Cos",
    "Tan",
    "Asin",
    "Acos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Acosh",
    "Atanh",
    "Erf",
    "Erfc",
    "Erfinv",
    "Ndtri",
    "Lgamma",
    "Digamma",
    "Floor",
    "Ceil",
    "Round",
    "Rint",
    "IsFinite",
    "IsNan",
    "IsInf",
    "LogicalNot",
    "LogicalAnd",
    "LogicalOr",
    "FloorMod",
    "Mod",
    "FloorDiv",
    "TruncateDiv",
    "TruncateMod",
    "Atan2",
    "BesselI0",
    "BesselI0e",
    "BesselI1",
    "BesselI1e",
    "Invert",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "LeftShift",
    "RightShift",
    "PopulationCount",
    "StringLower",
    "StringUpper",
    "RegexReplace",
    "StaticRegexReplace",
    "StaticRegexFullMatch",
    "RegexFullMatch",
    "StringStrip",
    "StringLength",
    "StringToHashBucketFast",
    "StringToHashBucketStrong",
    "StringToHashBucket",
    "AsString",
    "StringJoin",
    "StringToNumber",
    "Substr",
    "Bucketize",
    "Igamma",
    "Igammac",
    "Betainc",
    "Polygamma",
    "Zeta",
    "NextAfter",
    "DecodeBase64",
    "EncodeBase64",
    "UnicodeTranscode",
]
_POWERS = {
    "Square": 2,
    "Sqrt": 0.5,
    "Rsqrt": -0.5,
    "Reciprocal": -1,
    "Inv": -1,
}


def _elementwise(
    degree: Callable[..., Degree],
) -> Callable[..., Value]:
    """Make a rule of the degree of the output."""

    def apply(node: Node, *values: Value) -> Value:
        refuse_sums(node, values)
        return aligned(node, values, degree(node, *values))

    return apply


rule(*_NONLINEAR)(_elementwise(free))
rule("Relu", "Abs", "LeakyRelu", "ComplexAbs")(
    _elementwise(lambda node, value: value.degree)
)
rule("Sign", "Angle")(_elementwise(lambda node, value: 0))


def _power(exponent: float) -> Callable[..., Degree]:
    def degree(node: Node, value: Value) -> Degree:
        if exponent < 0 and node.dtype(0).is_integer:
            return free(node, value)
        return power(value.degree, exponent)

    return degree


for _type, _exponent in _POWERS.items():
    rule(_type)(_elementwise(_power(_exponent)))
_COMPARISONS = "Less LessEqual Greater GreaterEqual Equal NotEqual"


@rule(*_COMPARISONS.split(), "ApproximateEqual")
def _compared(node: Node, *values: Value) -> Value:
    refuse_sums(node, values)
    common((v.degree for v in values), "compares")
    return aligned(node, values, 0)


rule("SquaredDifference")(
    _elementwise(
        lambda node, *values: power(
            common((v.degree for v in values), "subtracts"), 2
        )
    )
)
rule("ClipByValue")(
    _elementwise(
        lambda node, *values: common((v.degree for v in values), "compares")
    )
)
rule("Complex")(
    _elementwise(
        lambda node, *values: common((v.degree for v in values), "joins")
    )
)


@rule("Xlogy", "Xlog1py")
def _times_logarithm(node: Node, x: Value, y: Value) -> Value:
    free(node, y)
    if x.kind is Kind.SUM and y.kind is Kind.SAME:
        return total(x.degree, shape=shapes_together((x, y)))
    refuse_sums(node, (x, y))
    return aligned(node, (x, y), x.degree)


@rule("Pow")
def _raised(node: Node, base: Value, exponent: Value) -> Value:
    known = exponent.known
    if known is not None and known.size == 1:
        (number,) = known.flat
        if isinstance(number, (int, float)) and not node.dtype(0).is_integer:
            if number == 1:
                return base.with_(shape=shapes_together((base, exponent)))
            refuse_sums(node, (base,))
            degree = power(base.degree, number)
            if degree is None and number <= 0:
                degree = 0
            return aligned(node, (base, exponent), degree)
    refuse_sums(node, (base, exponent))
    return aligned(node, (base, exponent), free(node, base, exponent))


@rule("Maximum", "Minimum")
def _extreme(node: Node, a: Value, b: Value) -> Value:
    if node.type == "Maximum" and a.kind is b.kind is Kind.SAME:
        for count, least in ((a, b), (b, a)):
            # There is one example at least.
            if _is_count(count) and _is_one_or_less(least):
                return same(
                    count.degree,
                    shape=shapes_together((a, b)),
                    known=count.known,
                )
    refuse_sums(node, (a, b))
    degree = common((a.degree, b.degree), "compares")
    return aligned(node, (a, b), degree)


def _is_count(value: Value) -> bool:
    known = value.known
    return known is not None and all(
        isinstance(e, Size)
        and e.number >= 1
        and all(p > 0 for _, p in e.powers)
        for e in known.flat
    )


def _is_one_or_less(value: Value) -> bool:
    known = value.known
    return known is not None and all(
        isinstance(e, (int, float)) and e <= 1 for e in known.flat
    )


def _linear_in(
    gradient: int, degree: Callable[[Degree], Degree]
) -> Callable[..., Value]:
    """Make a rule of a gradient, which is linear in what it is a gradient of.

    Args:
        gradient: which of its two inputs it is linear in.
        degree: gives the factor's degree for that of the other input.
    """

    def apply(node: Node, *values: Value) -> Value:
        upstream, at = values[gradient], values[1 - gradient]
        factor = degree(0 if at.degree is None else at.degree)
        result = product(upstream.degree, factor)
        if upstream.kind is Kind.SUM and at.kind is Kind.SAME:
            return total(result, shape=shapes_together(values))
        refuse_sums(node, values)
        return aligned(node, values, result)

    return apply


def _no_degree(degree: Degree) -> Degree:
    if degree:
        raise DoesNotSplit(
            "takes the gradient of what scales with the number of examples"
        )
    return 0


rule("ReluGrad", "LeakyReluGrad")(_linear_in(0, lambda d: 0))
rule("Relu6Grad", "EluGrad", "SeluGrad", "SoftplusGrad", "SoftsignGrad")(
    _linear_in(0, _no_degree)
)
rule("TanhGrad", "SigmoidGrad")(_linear_in(1, _no_degree))
rule("SqrtGrad")(_linear_in(1, lambda d: power(d, -1)))
rule("RsqrtGrad")(_linear_in(1, lambda d: power(d, 3)))
rule("ReciprocalGrad", "InvGrad")(_linear_in(1, lambda d: power(d, 2)))


@rule("Bitcast")
def _other_type(node: Node, value: Value) -> Value:
    refuse_sums(node, (value,))
    if node.dtype(0).size != node.output_dtype(0).size:
        raise DoesNotSplit("reads the bytes of numbers")
    degree = free(node, value)
    return value.with_(degree=degree, shape=value.shape)
