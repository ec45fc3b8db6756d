"""Whether values may be infinite, which sums of products of them depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.layouts import Value
from keras_towers.partition.nodes import Node
from keras_towers.partition.sizes import UNKNOWN, is_data_dependent

# Operations whose outputs are finite or NaN, and operations whose outputs are
# infinite only if an input is.
_BOUNDED = "Tanh Sigmoid Softmax Sign Sin Cos Erf Relu6 OnesLike ZerosLike"
_MOVES = """
    Identity StopGradient Reshape ExpandDims Squeeze Transpose BroadcastTo Tile
    Fill OneHot Pack ConcatV2 StridedSlice Slice Neg Abs Select SelectV2
"""
_QUOTIENTS = ("RealDiv", "Div")
# Operations whose factor only selects entries, or whose quotient is never
# infinite.
_HARMLESS = ("ReluGrad", "Relu6Grad", "LeakyReluGrad", "DivNoNan")


def is_finite_factor(node: Node, index: int, value: Value) -> bool:
    """Whether a partial sum may be multiplied before it is added up.

    It may not if the factor can be infinite: a tower's term may be 0 although
    the sum is not, and 0 times infinity is NaN. The same holds for division by
    0.
    """
    tensor = node.operation.inputs[index]
    if node.type not in _QUOTIENTS:
        return node.type in _HARMLESS or not _may_be_infinite(tensor)
    known = value.known
    if known is None:
        known = tf.get_static_value(tensor)
    return known is not None and not any(map(_may_be_zero, np.ravel(known)))


def _may_be_zero(number: Any) -> bool:
    return number is UNKNOWN or is_data_dependent(number) or number == 0


def _may_be_infinite(tensor: Any) -> bool:
    """Whether a traced tensor may have an infinite entry."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        operation, dtype = tensor.op, tensor.dtype
        if tensor.name in seen or not (dtype.is_floating or dtype.is_complex):
            continue
        seen.add(tensor.name)
        if operation.type == "Const":
            if np.isinf(tf.get_static_value(tensor)).any():
                return True
        elif operation.type == "Cast":
            (before,) = operation.inputs
            # No integer is too large for float32.
            is_real = before.dtype.is_floating or before.dtype.is_complex
            size, size_before = (
                each.real_dtype.size for each in (dtype, before.dtype)
            )
            if size < 4 or (is_real and size < size_before):
                return True
            waiting.append(before)
        elif operation.type in _MOVES.split():
            waiting += operation.inputs
        elif operation.type not in _BOUNDED.split():
            return True
    return False
