"""Operations on single entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
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


@rule(
    *("Identity", "Neg", "StopGradient", "PreventGradient", "Snapshot"),
    *("CheckNumerics", "CheckNumericsV2", "Real", "Imag", "Conj"),
    *("PlaceholderWithDefault", "DeepCopy", "EnsureShape"),
    *("DebugIdentityV2", "Copy"),
)
def _as_it_is(node: Node, value: Value) -> Value:
    keeps = node.type in ("Identity", "StopGradient", "Snapshot")
    return value.with_(shape=value.shape, known=value.known if keeps else None)


@rule("IdentityN")
def _as_they_are(node: Node, *values: Value) -> list[Value]:
    return list(values)


@rule("Cast")
def _cast(node: Node, value: Value) -> Value:
    to, of = node.output_dtype(0), node.dtype(0)
    if not _keeps(of, to):
        if value.kind is Kind.SUM and value.degree is not None:
            raise DoesNotSplit("rounds a sum or mean over the batch")
        free(node, value)
    whole = of.is_integer or of.is_bool
    counts = value.known if whole and _keeps(of, to) else None
    return value.with_(shape=value.shape, known=counts)


def _keeps(of: Any, to: Any) -> bool:
    """Whether a cast leaves numbers what they are, but for rounding errors."""
    if of.is_bool:
        return True
    if of.is_complex:
        return bool(to.is_complex)
    if to.is_floating or to.is_complex:
        return True
    if not (of.is_integer and to.is_integer):
        return False
    return bool(of.min >= to.min and of.max <= to.max)


@rule("Bitcast")
def _other_type(node: Node, value: Value) -> Value:
    refuse_sums(node, (value,))
    if node.dtype(0).size != node.output_dtype(0).size:
        raise DoesNotSplit("reads the bytes of numbers")
    degree = free(node, value)
    return value.with_(degree=degree, shape=value.shape)


@rule("AddV2", "Add", "Sub", "AddN", "AccumulateNV2")
def _added(node: Node, *values: Value) -> Value:
    return added(node, values)


@rule("BiasAdd", "BiasAddV1")
def _bias(node: Node, value: Value, bias: Value) -> Value:
    if bias.kind is Kind.ROWS:
        raise DoesNotSplit("adds examples as a bias")
    first = node.type == "BiasAdd" and node.attr("data_format") == b"NCHW"
    if not first or value.kind is not Kind.ROWS:
        result = added(node, (value, bias))
        return result.with_(shape=value.shape)
    if bias.kind is Kind.SUM and bias.degree is not None:
        raise DoesNotSplit("gives every example a sum or mean over the batch")
    degree = common((value.degree, bias.degree))
    return value.with_(degree=degree, shape=value.shape)


@rule("Mul", "MulNoNan")
def _times(node: Node, *values: Value) -> Value:
    degree = product(*(v.degree for v in values))
    sums = [v for v in values if v.kind is Kind.SUM]
    if not sums:
        return aligned(node, values, degree)
    if len(sums) > 1:
        raise DoesNotSplit(
            "multiplies sums or means over the batch with each other"
        )
    if any(v.kind is Kind.ROWS and v.degree is not None for v in values):
        raise DoesNotSplit(
            "multiplies every example by a sum or mean over the batch"
        )
    return total(degree, shape=shapes_together(values))


@rule("RealDiv", "Div", "DivNoNan", "Xdivy")
def _divided(node: Node, a: Value, b: Value) -> Value:
    if node.dtype(0).is_integer:
        refuse_sums(node, (a, b))
        return aligned(node, (a, b), free(node, a, b))
    if b.degree is None and node.type in ("RealDiv", "Div"):
        refuse_sums(node, (a, b))
        return aligned(node, (a, b), a.degree or 0)
    below = 0 if b.degree is None else power(b.degree, -1)
    degree = product(a.degree, below)
    if b.kind is Kind.SUM:
        whose = {
            Kind.SUM: "a sum over the batch by another",
            Kind.ROWS: "every example by a sum or mean over the batch",
        }
        raise DoesNotSplit(
            "divides " + whose.get(a.kind, "by a sum or mean over the batch")
        )
    if a.kind is Kind.SUM:
        if b.kind is Kind.ROWS:
            raise DoesNotSplit("divides a sum over the batch by every example")
        return total(degree, shape=shapes_together((a, b)))
    return aligned(node, (a, b), degree)


@rule("Select", "SelectV2")
def _chosen(node: Node, condition: Value, a: Value, b: Value) -> Value:
    free(node, condition)
    if condition.kind is Kind.SUM:
        raise DoesNotSplit("chooses by a sum or mean over the batch")
    if node.type == "Select" and node.rank(0) != node.rank(1):
        raise DoesNotSplit("chooses rows by a vector")
    if Kind.SUM in (a.kind, b.kind):
        if condition.kind is Kind.ROWS:
            raise DoesNotSplit(
                "gives every example a sum or mean over the batch"
            )
        chosen = added(
            node,
            (a, b),
            "chooses between",
            [node.rank(1) or 0, node.rank(2) or 0],
        )
        return chosen.with_(shape=shapes_together((condition, a, b)))
    degree = common((a.degree, b.degree), "chooses between")
    return aligned(node, (condition, a, b), degree)
