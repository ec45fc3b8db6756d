"""Adding, multiplying and choosing: what is linear in an input."""

from __future__ import annotations

from typing import Any

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
from keras_towers.splitting.sizes import UNKNOWN
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Value,
    common,
    power,
    product,
    total,
)


@rule(
    *("Identity", "Neg", "StopGradient", "PreventGradient", "Snapshot"),
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
