"""Operations on single entries: arithmetic, choices and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_towers.partition.sizes import UNKNOWN, Size
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    free,
    has_sum,
    nonlinear,
    refuse_sums,
    rule,
    shapes_together,
)
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
_NONLINEAR = (
    *("Exp", "Expm1", "Log", "Log1p", "Sigmoid", "Softplus", "Softsign"),
    *("Elu", "Selu", "Relu6", "Floor", "Ceil", "Round", "Rint"),
    *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Atan2"),
    *("Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh"),
    *("Erf", "Erfc", "Erfinv", "Ndtri", "Lgamma", "Digamma", "Polygamma"),
    *("Igamma", "Igammac", "Betainc", "Zeta", "NextAfter"),
    *("BesselI0", "BesselI0e", "BesselI1", "BesselI1e", "Bucketize"),
    *("IsFinite", "IsNan", "IsInf", "LogicalNot", "LogicalAnd", "LogicalOr"),
    *("Mod", "FloorMod", "FloorDiv", "TruncateDiv", "TruncateMod"),
    *("Invert", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("LeftShift", "RightShift", "PopulationCount"),
    *("RegexReplace", "StaticRegexReplace", "RegexFullMatch"),
    *("StaticRegexFullMatch", "StringLower", "StringUpper", "StringStrip"),
    *("StringLength", "StringJoin", "StringToNumber", "AsString", "Substr"),
    *("StringToHashBucket", "StringToHashBucketFast"),
    *("StringToHashBucketStrong", "DecodeBase64", "EncodeBase64"),
    "UnicodeTranscode",
)
_POWERS = {"Square": 2, "Sqrt": 0.5, "Rsqrt": -0.5, "Reciprocal": -1, "Inv": -1}


def _power(node: Node, value: Value) -> Degree:
    exponent = _POWERS[node.type]
    if exponent < 0 and node.dtype(0).is_integer:
        return free(node, value)
    return power(value.degree, exponent)


def _one(verb: str) -> Callable[..., Degree]:
    """The one degree that all inputs have."""
    return lambda node, *values: common((v.degree for v in values), verb)


def _of_comparison(node: Node, *values: Value) -> Degree:
    _one("compares")(node, *values)
    return 0


# Types, and the degree of what they return.
_DEGREES: Sequence[tuple[Iterable[str], Callable[..., Degree]]] = (
    (_NONLINEAR, free),
    (_POWERS, _power),
    (("Relu", "Abs", "LeakyRelu", "ComplexAbs"), _one("takes")),
    (("Sign", "Angle"), _of_comparison),
    (("Less", "LessEqual", "Greater", "GreaterEqual"), _of_comparison),
    (("Equal", "NotEqual", "ApproximateEqual"), _of_comparison),
    (("ClipByValue", "Minimum"), _one("compares")),
    (("Complex",), _one("joins")),
    (
        ("SquaredDifference",),
        lambda node, *values: power(_one("subtracts")(node, *values), 2),
    ),
)


def _elementwise(degree: Callable[..., Degree]) -> Callable[..., Value]:
    """Make a rule of the degree of the output."""

    def apply(node: Node, *values: Value) -> Value:
        refuse_sums(node, values)
        return aligned(node, values, degree(node, *values))

    return apply


for _types, _degree in _DEGREES:
    rule(*_types)(_elementwise(_degree))


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
    return aligned(node, (base, exponent), nonlinear(node, base, exponent))


@rule("Maximum")
def _largest(node: Node, *values: Value) -> Value:
    for count, least in (values, values[::-1]):
        # There is one example at least.
        if _is_count(count) and _is_at_most_1(least):
            shape = shapes_together(values)
            return same(count.degree, shape=shape, known=count.known)
    return _elementwise(_one("compares"))(node, *values)


def _is_count(value: Value) -> bool:
    known = value.known if value.kind is Kind.SAME else None
    return known is not None and all(
        isinstance(e, Size)
        and e.number >= 1
        and all(p > 0 for _, p in e.powers)
        for e in known.flat
    )


def _is_at_most_1(value: Value) -> bool:
    known = value.known if value.kind is Kind.SAME else None
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


for _types, _gradient, _factor in (
    (("ReluGrad", "LeakyReluGrad"), 0, lambda d: 0),
    (("Relu6Grad", "EluGrad", "SeluGrad"), 0, _no_degree),
    (("SoftplusGrad", "SoftsignGrad"), 0, _no_degree),
    (("TanhGrad", "SigmoidGrad"), 1, _no_degree),
    (("SqrtGrad",), 1, lambda d: power(d, -1)),
    (("RsqrtGrad",), 1, lambda d: power(d, 3)),
    (("ReciprocalGrad", "InvGrad"), 1, lambda d: power(d, 2)),
):
    rule(*_types)(_linear_in(_gradient, _factor))


@rule("Bitcast")
def _other_type(node: Node, value: Value) -> Value:
    degree = nonlinear(node, value)
    if node.dtype(0).size != node.output_dtype(0).size:
        raise DoesNotSplit("reads the bytes of numbers")
    return value.with_(degree=degree, shape=value.shape)


@rule(
    *("Identity", "Neg", "StopGradient", "Snapshot"),
    *("CheckNumerics", "CheckNumericsV2", "Real", "Imag", "Conj"),
    *("PlaceholderWithDefault", "DeepCopy", "EnsureShape"),
    *("DebugIdentityV2", "Copy"),
)
def _as_it_is(node: Node, value: Value) -> Value:
    keeps = node.type in ("Identity", "StopGradient", "Snapshot")
    return value.with_(shape=value.shape, known=value.known if keeps else None)


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


@rule("AddV2", "Add", "Sub", "AddN", "AccumulateNV2")
def _added(node: Node, *values: Value) -> Value:
    return added(node, values)


@rule("BiasAdd", "BiasAddV1")
def _bias(node: Node, value: Value, bias: Value) -> Value:
    if bias.kind is Kind.ROWS:
        raise DoesNotSplit("adds examples as a bias")
    return added(node, (value, bias)).with_(shape=value.shape)


@rule("Mul", "MulNoNan")
def _times(node: Node, *values: Value) -> Value:
    degree = product(*(v.degree for v in values))
    if has_sum(values):
        return total(degree, shape=shapes_together(values))
    return aligned(node, values, degree)


@rule("RealDiv", "Div", "DivNoNan", "Xdivy")
def _divided(node: Node, a: Value, b: Value) -> Value:
    if node.dtype(0).is_integer:
        return aligned(node, (a, b), nonlinear(node, a, b))
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
    known = UNKNOWN if condition.known is None else condition.known.flat[0]
    if known is not UNKNOWN and shapes_together((condition, a, b)) == ():
        return a if known else b
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
