"""Sums over processes by communication hooks, which may send less.

=================  ============================================================
``all_reduce``     no compression
``fp16``           sends float16; engines that sum it in hardware, such as
                   NCCL, sum it; otherwise the same as ``fp16_shards``
``fp16_shards``    sends float16; each rank sums one shard in float32
``bf16_shards``    the same with bfloat16: the range of float32, 8 bits of
                   precision; engines cannot sum bfloat16 themselves
``error_feedback`` adds each gradient's rounding error to the next one
``power_sgd``      sends two thin factors of each matrix (Vogels et al.,
                   "PowerSGD: Practical Low-Rank Gradient Compression for
                   Distributed Optimization", 2019), with error feedback
=================  ============================================================

With shards, an all-to-all followed by sums is the reduce-scatter, and an
all-gather follows; sums are rounded again before they are sent back. Two ranks
instead exchange all values at once, which sends the same amount, and both sum
them. A value too large for float16 becomes infinity, which
``LossScaleOptimizer`` detects.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    Reduction,
    check_floats,
    dense_of,
    in_order,
    sparse_of,
)
from keras_towers.transport import Transport, messages, next_key

CommunicationHook: TypeAlias = Callable[
    [Transport, Sequence[tf.Tensor], str], list[tf.Tensor]
]
"""Returns the N sums over the ranks of this rank's N dense tensors.

The string is a prefix for the keys of the collectives, the same on all ranks.
The sums are bit-identical on every rank.
"""

Summed = TypeVar("Summed", bound=Gradient)


def all_reduce(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Sum tensors losslessly, by the transport's all-reduce."""
    return transport.all_reduce(tensors, key)


def across_ranks(
    reduction: Reduction,
    transport: Transport,
    hook: CommunicationHook = all_reduce,
) -> Reduction:
    """Extend a reduction over towers to several processes.

    Gradients are summed over the towers of each process first; each process
    then sends its sums once, and every tower gets the result. All processes
    have to call it with gradients of the same shapes.
    """

    def reduce(
        grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        rows = grads if len(grads) == 1 else reduction(grads, devices)
        sums = sum_over_ranks(transport, rows[0], hook)
        return [sums for _ in devices]

    return reduce


def sum_over_ranks(
    transport: Transport,
    grads: Sequence[Summed],
    hook: CommunicationHook = all_reduce,
) -> list[Summed]:
    """Sum each of N gradients over the ranks; a hook sums dense ones."""
    key = next_key("sum")
    totals = hook(transport, dense_of(grads), key)
    # Sparse gradients become the slices of all ranks, in rank order.
    slices = [
        tf.IndexedSlices(
            transport.all_gather(grad.values, f"{key}.values.{n}"),
            transport.all_gather(grad.indices, f"{key}.indices.{n}"),
            grad.dense_shape,
        )
        for n, grad in enumerate(sparse_of(grads))
    ]
    return in_order(grads, totals, slices)


def sum_separately(
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
    is_separate: Callable[[tf.Tensor], bool],
    sum_chosen: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Sum some tensors by a given function, and the rest by an all-reduce."""
    sums = list(tensors)
    # An engine may reject empty messages.
    full = [i for i, t in enumerate(tensors) if t.shape.num_elements() != 0]
    chosen = [i for i in full if is_separate(tensors[i])]
    others = [i for i in full if i not in set(chosen)]
    totals = [*sum_chosen([tensors[i] for i in chosen])] if chosen else []
    if others:
        rest = [tensors[i] for i in others]
        totals += transport.all_reduce(rest, f"{key}.rest")
    for i, total in zip([*chosen, *others], totals, strict=True):
        sums[i] = total
    return sums


_BUCKET_BYTES = 16 * 2**20


def is_rounded(tensor: tf.Tensor, dtype: tf.DType) -> bool:
    """Whether sending a gradient as ``dtype`` loses precision."""
    return tensor.dtype.is_floating and tensor.dtype.size > dtype.size


def _sum_in_shards(
    dtype: tf.DType,
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    """Send a 16-bit dtype; each rank sums its shard in float32."""

    def exchange(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        known = all(t.shape.is_fully_defined() for t in tensors)
        if transport.size == 2 and known:
            return _sum_two(dtype, transport, tensors, key)
        return messages.send_packed(
            tensors,
            lambda vectors: [
                _sum_shards(dtype, transport, vector, f"{key}.{n}")
                for n, vector in enumerate(vectors)
            ],
            _BUCKET_BYTES,
        )

    check_floats(tensors)
    return sum_separately(
        transport, tensors, key, lambda t: is_rounded(t, dtype), exchange
    )


def fp16_shards(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send float16; each rank sums its shard in float32."""
    return _sum_in_shards(tf.float16, transport, tensors, key)


def bf16_shards(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send bfloat16; each rank sums its shard in float32."""
    return _sum_in_shards(tf.bfloat16, transport, tensors, key)


def fp16(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send float16; engines that sum it at full speed do so."""
    if not transport.sums_float16:
        return fp16_shards(transport, tensors, key)
    check_floats(tensors)
    sent = [
        tf.cast(t, tf.float16) if is_rounded(t, tf.float16) else t
        for t in tensors
    ]
    sums = transport.all_reduce(sent, key)
    return [tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)]


def _sum_shards(
    dtype: tf.DType, transport: Transport, tensor: tf.Tensor, key: str
) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    elements = tf.size(flat)
    padded = tf.pad(flat, [[0, -elements % transport.size]])
    shards = transport.all_to_all(tf.cast(padded, dtype), f"{key}.parts")
    rows = tf.unstack(
        tf.reshape(shards, [transport.size, -1]), num=transport.size
    )
    total = tf.add_n([tf.cast(row, tf.float32) for row in rows])
    totals = transport.all_gather(tf.cast(total, dtype), f"{key}.sums")
    totals = tf.cast(totals[:elements], tensor.dtype)
    return tf.ensure_shape(tf.reshape(totals, tf.shape(tensor)), tensor.shape)


def _sum_two(
    dtype: tf.DType,
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    """Sum the tensors of two ranks, which exchange all values.

    An all-to-all or a gather would be slower: in a ring of two ranks, Gloo uses
    one direction of the link at a time. So the bits are summed as integers,
    which may wrap around, and each rank subtracts its own to get the other
    rank's.
    """
    sent = [tf.cast(t, dtype) for t in tensors]
    words = [messages.words_of(t) for t in sent]
    sums = transport.all_reduce(words, f"{key}.both")
    totals = []
    for own, mine, both, tensor in zip(sent, words, sums, tensors, strict=True):
        other = messages.from_words(both - mine, dtype, tf.shape(own))
        total = tf.cast(own, tf.float32) + tf.cast(other, tf.float32)
        totals.append(tf.cast(tf.cast(total, dtype), tensor.dtype))
    return totals


_owner: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "owner", default=None
)


@contextlib.contextmanager
def owned_by(owner: Any) -> Iterator[None]:
    """Store the state of hooks that run in this block for an owner.

    Several optimizers may use the same keys and shapes of gradients, but the
    error of one must not be added to the gradients of another.
    """
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


class HookMemory:
    """Variables that keep values of a hook between steps, for each owner."""

    def __init__(self) -> None:
        self._variables: weakref.WeakKeyDictionary[
            Any, dict[tuple[Any, ...], tf.Variable]
        ] = weakref.WeakKeyDictionary()

    def variable(
        self, name: tuple[Any, ...], initial: Callable[[], tf.Tensor]
    ) -> tf.Variable:
        """Return the variable with this name, created on first use.

        An owner may use a key for several lists of gradients, so a name also
        contains index, shape and dtype.
        """
        owner = self if _owner.get() is None else _owner.get()
        variables = self._variables.setdefault(owner, {})
        if name not in variables:
            with tf.init_scope(), compat.single_device_mode():
                variables[name] = tf.Variable(initial(), trainable=False)
        return variables[name]


def error_feedback(
    hook: CommunicationHook, dtype: tf.DType
) -> CommunicationHook:
    """Add the rounding error of each gradient to the next one.

    Each rank stores its own rounding errors, which takes as much memory as its
    gradients. The rounding of the sums that are sent back is not compensated.
    For values that are not finite, no error is stored.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", 2014; Karimireddy et
    al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    2019.

    Args:
        hook: sums the gradients, and rounds wider dtypes.
        dtype: the dtype that it rounds to.

    Returns:
        A stateful hook; use it for one strategy only.

    Example:
        >>> error_feedback(fp16_shards, tf.float16)
    """
    memory = HookMemory()

    def corrected_hook(
        transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        sent, stored = [], []
        for index, tensor in enumerate(tensors):
            known = tensor.shape.is_fully_defined()
            if not (known and is_rounded(tensor, dtype)):
                sent.append(tensor)
                continue
            name = (key, index, tuple(tensor.shape), tensor.dtype)
            lost = memory.variable(
                name, partial(tf.zeros, tensor.shape, tensor.dtype)
            )
            wanted = tensor + lost
            error = wanted - tf.cast(tf.cast(wanted, dtype), tensor.dtype)
            kept = tf.where(tf.math.is_finite(error), error, 0)
            sent.append(wanted)
            stored.append(lost.assign(kept, read_value=False))
        sums = hook(transport, sent, key)
        # Nothing else in the graph depends on the assignments.
        with tf.control_dependencies(stored):
            return [tf.identity(total) for total in sums]

    return corrected_hook


def power_sgd(rank: int = 4) -> CommunicationHook:
    """Send the factors P and Q of a low-rank approximation of the sum.

    A gradient of shape [..., columns] is taken as a matrix M of N rows. With
    the Q of the step before, P is the orthonormal basis of the sum of M Q over
    the ranks, [N, rank]; Q becomes the sum of the transposed M times P,
    [columns, rank]; the sum of M is approximated by P times the transposed Q.
    The approximation error of a rank's M is added to its next M (error
    feedback), which takes as much memory as the gradients.

    Vectors, and matrices whose factors would have more than half as many
    elements, are summed losslessly. Ranks with the same kind of processor get
    bit-identical sums.

    Args:
        rank: columns of both factors; more are more exact, but send more.

    Returns:
        A stateful hook; use it for one strategy only.

    Raises:
        TowerError: a rank below 1, or integer gradients.

    Example:
        >>> keras_towers.HorovodStrategy(compression=power_sgd(rank=8))
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TowerError(
            f"rank={rank!r} of PowerSGD is not allowed: give 1 or more columns."
        )
    memory = HookMemory()

    def hook(
        transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        def by_factors(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return _sum_factors(transport, memory, rank, tensors, key)

        check_floats(tensors)
        return sum_separately(
            transport, tensors, key, lambda t: _shrinks(t, rank), by_factors
        )

    return hook


def _shrinks(tensor: tf.Tensor, rank: int) -> bool:
    """Whether factorizing a gradient at least halves its elements."""
    if not tensor.shape.is_fully_defined() or len(tensor.shape) < 2:
        return False
    elements, columns = tensor.shape.num_elements(), tensor.shape[-1]
    return 2 * rank * (elements // columns + columns) <= elements


def _sum_factors(
    transport: Transport,
    memory: HookMemory,
    rank: int,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    lost, factors, matrices = [], [], []
    for index, tensor in enumerate(tensors):
        columns: Any = tensor.shape[-1]
        matrix = tf.reshape(tensor, [-1, columns])
        if tensor.dtype.size < tf.float32.size:
            matrix = tf.cast(matrix, tf.float32)
        shape, dtype = matrix.shape, matrix.dtype
        name = (key, index, tuple(tensor.shape), dtype)
        error = memory.variable(
            (*name, "lost"), partial(tf.zeros, shape, dtype)
        )
        drawn = partial(
            tf.random.stateless_normal, [columns, rank], (rank, index)
        )
        factors.append(
            memory.variable((*name, "factor"), partial(drawn, dtype=dtype))
        )
        lost.append(error)
        matrices.append(matrix + error)
    sums = transport.all_reduce(
        [tf.matmul(m, q) for m, q in zip(matrices, factors, strict=True)],
        f"{key}.p",
    )
    bases = [tf.linalg.qr(total).q for total in sums]
    projections = [
        tf.matmul(m, basis, transpose_a=True)
        for m, basis in zip(matrices, bases, strict=True)
    ]
    sums = transport.all_reduce(projections, f"{key}.q")
    stored = []
    for matrix, basis, projection, total, error, factor in zip(
        matrices, bases, projections, sums, lost, factors, strict=True
    ):
        rest = matrix - tf.matmul(basis, projection, transpose_b=True)
        # Ignore steps that overflow. Keep nonzero factors, too: from zero, as
        # for units that are still idle, a factor would never recover.
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


CompressionName: TypeAlias = Literal[
    "none",
    "fp16",
    "fp16-shards",
    "bf16",
    "fp16-feedback",
    "bf16-feedback",
    "power-sgd",
]
"""How gradients are exchanged between processes."""


_FEEDBACK = "; a rank's rounding error is added to its next gradient"
_NAMED: dict[str, tuple[Callable[[], CommunicationHook], str]] = {
    "none": (lambda: all_reduce, ""),
    "fp16": (
        lambda: fp16,
        "sent in float16, and summed in float16 by NCCL and BytePS",
    ),
    "fp16-shards": (lambda: fp16_shards, "sent in float16"),
    "bf16": (lambda: bf16_shards, "sent in bfloat16"),
    "fp16-feedback": (
        lambda: error_feedback(fp16_shards, tf.float16),
        f"sent in float16{_FEEDBACK}",
    ),
    "bf16-feedback": (
        lambda: error_feedback(bf16_shards, tf.bfloat16),
        f"sent in bfloat16{_FEEDBACK}",
    ),
    "power-sgd": (
        power_sgd,
        "sent as two low-rank factors if they are matrices; a rank's error is "
        "added to its next gradient",
    ),
}


def hook_for(
    compression: CompressionName | CommunicationHook | None,
) -> CommunicationHook:
    """Return the hook for a user's choice; None: ``all_reduce``."""
    if callable(compression):
        return compression
    make, _ = _NAMED[compression or "none"]
    return make()


def describe_effect(
    compression: CompressionName | CommunicationHook | None,
) -> str:
    """Describe how gradients are exchanged, if that may change results."""
    if callable(compression):
        kind = type(compression).__qualname__
        name = getattr(compression, "__qualname__", kind).split(".<locals>")[0]
        return f"gradients are exchanged by {name}, which may change results"
    _, how = _NAMED[compression or "none"]
    if not how:
        return ""
    return f'compression "{compression}" changes results: gradients are {how}'
