"""How much an operation computes, estimated from the sizes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

PRODUCTS = ("MatMul", "BatchMatMul", "Einsum", "Conv", "DepthwiseConv")


def estimated_work(
    type_: str, inputs: Sequence[float], made: float, shape: tf.TensorShape
) -> float:
    """Return how much an operation computes.

    By the multiplications of products, such as those of matrices, of which
    each has a factor from either input; and of anything else by what it makes.

    Args:
        type_: the type of the operation.
        inputs: how many entries each of its N inputs has.
        made: how many entries it makes.
        shape: the shape of its first output.
    """
    if not type_.startswith(PRODUCTS):
        return made
    # Of shapes [m, k], [k, n] and [m, n]: m k n.
    work = math.sqrt(math.prod(sorted(inputs)[-2:]) * made)
    if type_.startswith("Batch") and shape.rank is not None:
        # The axes of the batch are in all three.
        batch = made
        for length in shape[-2:]:
            batch /= length or 1
        work /= math.sqrt(batch)
    return work
