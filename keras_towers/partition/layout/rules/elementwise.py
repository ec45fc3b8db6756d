"""Elementwise operations: arithmetic, choices and functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.ir.layouts import Sharded
from keras_towers.partition.ir.reasons import (
    EXCHANGE,
    SHAPE,
    require,
    unless_none,
)
from keras_towers.partition.ir.registry import (
    Factors,
    Rule,
    elementwise,
    operation,
)
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension
from keras_towers.partition.ir.values import Value, Values
from keras_towers.partition.layout import folding
from keras_towers.partition.layout.division import divide
from keras_towers.partition.layout.folding import Fold, comparing, exact_each
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules import (
    lists,
    ragged,
    row_numbers,
    row_splits,
)


def _add_n(node: Node, *inputs: Value) -> Factors:
    return elementwise(range(len(inputs)))(node, *inputs)


def _division(node: Node, *inputs: Value) -> Factors:
    linear = [[0]] if node.dtype(0).is_floating else []
    return elementwise(*linear)(node, *inputs)


def _cast(node: Node, value: Value) -> Factors:
    before, after = node.dtype(0), node.output_dtype()
    # Sums must be rounded once, not each term.
    is_exact = before.is_floating and after.is_floating
    is_exact = is_exact and (before == after or before.size < after.size)
    return elementwise(*[[0]] if is_exact else [])(node, value)


def _bitcast(node: Node, value: Value) -> Factors:
    require(node.shapes[0].rank == value.rank)
    return elementwise()(node, value)


def _bias_add(node: Node, value: Value, bias: Value) -> Factors:
    is_v1 = node.type == "BiasAddV1"
    channels_first = not is_v1 and node.attr("data_format") == b"NCHW"
    channels = 1 if channels_first else value.rank - 1
    whole = range(value.rank)
    return Factors([whole, [channels]], [whole], linear=[[0, 1]])


def _select(node: Node, *inputs: Value) -> Factors:
    whole = range(inputs[1].rank)
    chosen = whole[: inputs[0].rank]
    return Factors([chosen, whole, whole], [whole], linear=[[1, 2]])


def _ensure_shape(node: Node, value: Value) -> Values:
    """Lay out ``tf.ensure_shape``, which checks the global number of rows."""
    if value.sharded is not None:
        return _ensure_rows(node, value.sharded, value)
    require(value.shape is not None, SHAPE)
    return divide(node, [value], elementwise([0])(node, value))


def _ensure_rows(node: Node, layout: Sharded, value: Value) -> Values:
    rows = tf.TensorShape(node.attr("shape"))[layout.axis]
    if rows is not None and rows != layout.size:
        _assert_rows(node, layout.size, rows)
    own = node.converter.shard(value, layout)
    return node.run_on_towers([own], layout, shapes=[value.sizes])


def _assert_rows(node: Node, size: Dimension, rows: int) -> None:
    """Assert that the global number of rows equals a size."""
    builder = node.builder
    require(builder.can_exchange, EXCHANGE)
    total = unless_none(node.units.global_size(size))
    is_equal = builder.op("Equal", [total, rows], ())
    text = f"{rows} rows are expected by {node.operation.name}, not"
    message = builder.constant(text, tf.string)
    builder.add(
        "Assert",
        [is_equal, message, total],
        {"T": [message.dtype, total.dtype]},
        (),
        has_effect=True,
    )


def _identity(node: Node, *inputs: Value) -> Values:
    return list(inputs)


# ---- what is known of them ---------------------------------------------------


def _entrywise(
    types: str,
    function: Callable[..., object] | None = None,
    fold: Callable[..., Fold] = folding.each,
    rules: Sequence[Rule] = (),
    linear: Sequence[Collection[int]] = (),
    **facts: Any,
) -> None:
    """Register operations whose entries each need one entry of each input.

    Args:
        types: their types.
        function: the function of entries that they are, if it is folded.
        fold: returns what folds it.
        rules: their rules.
        linear: the groups of inputs in which they are linear.
        **facts: what else is known.
    """
    if function is not None:
        facts["fold"] = fold(function)
    labels = elementwise(*linear)
    operation(types, *rules, labels=labels, memory="reused", **facts)


# fmt: off
_entrywise("""
    Exp Expm1 Log Log1p Softplus Softsign Elu Selu Relu LeakyRelu Floor Ceil
    Round Rint Tan Asin Acos Atan Atan2 Sinh Cosh Asinh Acosh Atanh Erfc Erfinv
    Ndtri Lgamma Digamma Polygamma Igamma Igammac IgammaGradA Betainc Zeta
    NextAfter BesselI0 BesselI0e BesselI1 BesselI1e Bucketize Sqrt Rsqrt
    Reciprocal Inv ComplexAbs Angle Complex Mod TruncateDiv TruncateMod
    ClipByValue SquaredDifference Xlogy Xlog1py Xdivy Pow SqrtGrad
    IsFinite IsNan IsInf ApproximateEqual CheckNumerics
    Invert BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift PopulationCount
    RegexReplace StaticRegexReplace RegexFullMatch StaticRegexFullMatch
    StringLower StringUpper StringStrip StringLength StringJoin StringToNumber
    AsString Substr StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong DecodeBase64 EncodeBase64 UnicodeTranscode
""")
_entrywise("Cos Erf Relu6 Sigmoid Sign Sin Tanh", bounds="finite")
_entrywise("DeepCopy Copy DebugIdentityV2 Real Imag Conj", linear=[[0]])
_entrywise("EluGrad SeluGrad SoftplusGrad SoftsignGrad", linear=[[0]])
_entrywise("ReluGrad LeakyReluGrad Relu6Grad", linear=[[0]], factor="selects")
_entrywise("TanhGrad SigmoidGrad RsqrtGrad ReciprocalGrad", linear=[[1]])
_entrywise("InvGrad", linear=[[1]])
# If the check fails on one tower, the step stops on all of them.
_entrywise("CheckNumericsV2", effect="checks")
# It is not linear in the second input: terms that are not 0 may add up to 0.
_entrywise("MulNoNan", linear=[[0]])
_entrywise("Add AddV2", operator.add, linear=[[0, 1]],
    notes=[row_numbers.note_calculated, row_splits.note_places])
_entrywise("Sub", operator.sub, rules=[row_splits.row_lengths], linear=[[0, 1]],
    notes=[row_splits.note_places])
_entrywise("Mul", operator.mul, linear=[[0], [1]],
    notes=[row_numbers.note_calculated, row_splits.note_scaled_splits])
_entrywise("FloorDiv", operator.floordiv, exact_each,
    notes=[row_numbers.note_calculated])
_entrywise("FloorMod", operator.mod, exact_each)
_entrywise("Maximum", folding.larger, exact_each,
    notes=[row_numbers.note_calculated, row_splits.note_places])
_entrywise("Minimum", folding.lesser, exact_each, rules=[ragged.least_number],
    notes=[row_splits.note_places])
_entrywise("Square", lambda a: a * a)
_entrywise("Abs", abs, exact_each, bounds="inputs")
_entrywise("Neg", operator.neg, linear=[[0]], bounds="inputs")
_entrywise("OnesLike", lambda a: 1, bounds="finite")
_entrywise("ZerosLike", lambda a: 0, rules=[lists.add_lists], linear=[[0]],
    notes=[row_numbers.note_limits, lists.note_sum], bounds="finite")
_entrywise("Less", operator.lt, comparing,
    notes=[row_splits.note_sequence_mask])
_entrywise("LessEqual", operator.le, comparing)
_entrywise("Greater", operator.gt, comparing)
_entrywise("GreaterEqual", operator.ge, comparing)
_entrywise("Equal", operator.eq, comparing)
_entrywise("NotEqual", operator.ne, comparing)
_entrywise("LogicalAnd", folding.both)
_entrywise("LogicalOr", folding.one_of)
_entrywise("LogicalNot", lambda a: UNKNOWN if a is UNKNOWN else not a)
_entrywise("SelectV2", folding.chosen, linear=[[1, 2]], bounds="inputs")
operation("Select", labels=_select, fold=folding.chosen_rows, bounds="inputs")
operation("AddN", lists.add_lists, labels=_add_n, notes=[lists.note_sum],
    memory="reused")
operation("RealDiv Div", labels=_division, factor="divides", memory="reused")
operation("DivNoNan", labels=_division, factor="selects", memory="reused")
operation("BiasAdd BiasAddV1", labels=_bias_add, memory="reused")
operation("Bitcast", labels=_bitcast)
operation("Cast", labels=_cast,
    notes=[row_numbers.note_moved, row_splits.note_splits], fold=folding.cast)
operation("EnsureShape", _ensure_shape, rows=_ensure_rows,
    shape=lambda node, value: value.sizes)
operation("PlaceholderWithDefault", labels=elementwise([0]))
operation("PreventGradient", labels=elementwise([0]), memory="input")
operation("Identity IdentityN StopGradient Snapshot", _identity,
    bounds="inputs", memory="input")
