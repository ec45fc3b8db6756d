"""Rules for products of matrices: see ``axes``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.fit.step import slices


def matmul(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``MatMul`` and its batched kinds."""
    one, two = tensor.op.inputs[:2]
    rank = tensor.shape.rank
    batched = tensor.op.type != "MatMul"
    flipped = [
        tensor.op.get_attr(name)
        for name in (("adj_x", "adj_y") if batched else _PLAIN)
    ]
    if axis < rank - 2:
        parts = [p for p in (one, two) if p.shape.rank == rank]
        return slices.first_of(walk, parts, axis, tensor.shape[axis])
    if axis == rank - 2:
        return slices.From(one, one.shape.rank - (1 if flipped[0] else 2))
    return slices.From(two, two.shape.rank - (2 if flipped[1] else 1))


_PLAIN = ("transpose_a", "transpose_b")


def einsum(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``Einsum``, by the labels of its equation."""
    equation = tensor.op.get_attr("equation").decode().replace(" ", "")
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if "..." in equation:
        rests = [
            part.shape.rank - len(term.replace("...", ""))
            for part, term in zip(tensor.op.inputs, terms, strict=True)
        ]
        names = "0123456789"[: max(rests)]
        terms = [
            term.replace("...", names[len(names) - rest :])
            for term, rest in zip(terms, rests, strict=True)
        ]
        output = output.replace("...", names)
    label = output[axis]
    for part, term in zip(tensor.op.inputs, terms, strict=True):
        place = term.find(label)
        if place >= 0 and part.shape[place] in (None, tensor.shape[axis]):
            return slices.From(part, place)
    return None
