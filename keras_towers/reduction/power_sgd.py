"""PowerSGD: of each matrix, two thin factors are sent instead of its elements.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction.feedback import Memory
from keras_towers.reduction.gradients import check_floats
from keras_towers.reduction.ranks import CommunicationHook, sum_apart
from keras_towers.transport import Transport

DEFAULT_RANK = 4


def power_sgd(rank: int = DEFAULT_RANK) -> CommunicationHook:
    """Send the factors P and Q of a sum that has at most a given rank.

    A gradient of shape [..., columns] is taken as a matrix M of N rows. With
    the Q of the step before, P is the orthonormal basis of the sum of M Q over
    the ranks, [N, rank]; Q becomes the sum of the transposed M times P,
    [columns, rank]; the sum of M is approximated by P times the transposed Q.
    What is lost of a rank's M is added to its next one (error feedback): that
    takes as much memory as its gradients.

    Vectors, and matrices of which the factors would not be half as large, are
    summed without loss. Ranks with the same kind of processor get sums that
    are bit-identical.

    Args:
        rank: columns of both factors: more are more exact, and more to send.

    Returns:
        A stateful hook; use it for one strategy only.

    Raises:
        TowerError: a rank below 1; gradients that are integers.

    Example:
        >>> keras_towers.HorovodStrategy(compression=power_sgd(rank=8))
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TowerError(
            f"rank={rank!r} of PowerSGD is not allowed: give 1 or more columns."
        )
    memory = Memory()

    def hook(
        transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        def by_factors(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return _sum_factors(transport, memory, rank, tensors, key)

        check_floats(tensors)
        return sum_apart(
            transport, tensors, key, lambda t: _is_worth(t, rank), by_factors
        )

    return hook


def _is_worth(tensor: tf.Tensor, rank: int) -> bool:
    """Whether the factors have at most half as many elements."""
    if not tensor.shape.is_fully_defined() or len(tensor.shape) < 2:
        return False
    elements, columns = tensor.shape.num_elements(), tensor.shape[-1]
    return 2 * rank * (elements // columns + columns) <= elements


def _sum_factors(
    transport: Transport,
    memory: Memory,
    rank: int,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    lost, factors, matrices = [], [], []
    for index, tensor in enumerate(tensors):
        columns = tensor.shape[-1]
        matrix = tf.reshape(tensor, [-1, columns])
        if tensor.dtype.size < tf.float32.size:
            matrix = tf.cast(matrix, tf.float32)
        name = key, index, tuple(tensor.shape), matrix.dtype
        error = memory.variable((*name, "lost"), tf.zeros, matrix.shape)

        def drawn(shape, dtype, index=index) -> tf.Tensor:
            return tf.random.stateless_normal(shape, (rank, index), dtype=dtype)

        factors.append(
            memory.variable(
                (*name, "factor"), drawn, tf.TensorShape([columns, rank])
            )
        )
        lost.append(error)
        matrices.append(matrix + error)
    sums = transport.all_reduce(
        [tf.matmul(m, q) for m, q in zip(matrices, factors, strict=True)],
        f"{key}.p",
    )
    bases = [tf.linalg.qr(total).q for total in sums]
    mine = [
        tf.matmul(m, basis, transpose_a=True)
        for m, basis in zip(matrices, bases, strict=True)
    ]
    sums = transport.all_reduce(mine, f"{key}.q")
    stored = []
    for matrix, basis, own, total, error, factor in zip(
        matrices, bases, mine, sums, lost, factors, strict=True
    ):
        rest = matrix - tf.matmul(basis, own, transpose_b=True)
        # A step that overflows leaves no trace. And from a zero, such as that
        # of the first units while they are idle, a factor would not recover.
        finite = tf.reduce_all(tf.math.is_finite(total))
        usable = finite & tf.reduce_any(total != 0, axis=0)
        stored += [
            error.assign(tf.where(finite, rest, error), read_value=False),
            factor.assign(tf.where(usable, total, factor), read_value=False),
        ]
    with tf.control_dependencies(stored):
        return [
            tf.cast(
                tf.reshape(tf.matmul(p, q, transpose_b=True), t.shape), t.dtype
            )
            for p, q, t in zip(bases, sums, tensors, strict=True)
        ]
