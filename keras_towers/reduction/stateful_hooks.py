"""Communication hooks that keep a state from one step to the next.

As in optax, the state is data: a hook makes the first one, gets the current one
in every step, and returns the next. ``rank_sum.py`` keeps it in variables, and
gives it to backups.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.incomplete_classes import Extensible
from keras_towers.foundation.object_types import Structure
from keras_towers.reduction.compression_hooks import (
    CommunicationHook,
    is_rounded,
    sum_separately,
)
from keras_towers.reduction.gradients import check_floats
from keras_towers.reduction.shared_memory import SharedMemoryAllReduce
from keras_towers.transport import Transport


class HookState(NamedTuple):
    """The state of a hook, in nested structures of tensors.

    Attributes:
        own: values that differ between ranks, and of which only the sum over
            ranks matters, such as gradients that a rank has not sent yet. If
            the number of ranks changes, each gets an equal share of the sum.
        common: values that are the same on all ranks.
    """

    own: Structure = ()
    common: Structure = ()


class StatefulHook(Extensible):
    """The base class of communication hooks with a state.

    For each list of weights that an optimizer updates, it keeps a state of the
    hook, in variables beside its own. ``kt.Backup`` saves these variables. A
    saved model does not contain them, because they belong to a job of several
    ranks. If you train a loaded model, the hook begins with the result of
    ``init``.

    Example:
        Each rank sends only the signs of its gradients, times their mean size,
        and adds the error to its next gradients:

        >>> class Signs(StatefulHook):
        ...     def init(self, specs):
        ...         errors = [tf.zeros(s.shape, s.dtype) for s in specs]
        ...         return HookState(own=errors)
        ...
        ...     def sum(self, transport, tensors, state, key):
        ...         wanted = [t + e for t, e in zip(tensors, state.own)]
        ...         sent = [
        ...             tf.sign(w) * tf.reduce_mean(abs(w)) for w in wanted
        ...         ]
        ...         errors = [w - s for w, s in zip(wanted, sent)]
        ...         sums = transport.all_reduce(sent, key)
        ...         return sums, HookState(own=errors)
        >>> keras_towers.HorovodStrategy(compression=Signs())
    """

    @property
    def kept_bytes(self) -> int:
        """The bytes that it keeps from step to step, besides its state."""
        return 0

    @abstractmethod
    def init(self, specs: Sequence[tf.TensorSpec]) -> HookState:
        """Return this rank's state before the first step.

        Args:
            specs: shapes and dtypes of N dense gradients. A dimension may be
                unknown.
        """

    @abstractmethod
    def sum(
        self,
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        state: HookState,
        key: str,
    ) -> tuple[list[tf.Tensor], HookState]:
        """Return the N sums over the ranks, and the next state.

        Args:
            transport: connects the ranks.
            tensors: this rank's N dense gradients.
            state: the state that the last step returned. The next state has the
                same structure, shapes and dtypes.
            key: a prefix for the keys of the collectives, the same on all
                ranks.
        """


@dataclasses.dataclass(frozen=True)
class WithoutState(StatefulHook):
    """A hook without a state, in the form of a stateful one.

    Attributes:
        hook: sums tensors.
    """

    hook: CommunicationHook

    @property
    def kept_bytes(self) -> int:
        """The bytes of the memory in which ranks of a machine sum, if any."""
        hook = self.hook
        return hook.kept_bytes if isinstance(hook, SharedMemoryAllReduce) else 0

    def init(self, specs: Sequence[tf.TensorSpec]) -> HookState:
        """Return an empty state."""
        return HookState()

    def sum(
        self,
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        state: HookState,
        key: str,
    ) -> tuple[list[tf.Tensor], HookState]:
        """Return the sums, and the empty state."""
        return self.hook(transport, tensors, key), state


def as_stateful(hook: CommunicationHook | StatefulHook) -> StatefulHook:
    """Return a hook of either kind as a stateful one."""
    return hook if isinstance(hook, StatefulHook) else WithoutState(hook)


@dataclasses.dataclass(frozen=True)
class NesterovMomentum(StatefulHook):
    """Adds Nesterov momentum to the sums of another hook.

    The velocity v becomes the momentum times v, plus the sum; what is returned
    is the sum plus the momentum times the new v.

    Attributes:
        hook: sums tensors.
        momentum: at least 0, and less than 1.
    """

    hook: StatefulHook
    momentum: float

    @property
    def kept_bytes(self) -> int:
        """Those of the other hook."""
        return self.hook.kept_bytes

    def init(self, specs: Sequence[tf.TensorSpec]) -> HookState:
        """Return velocities of zero, besides the state of the other hook."""
        own, common = self.hook.init(specs)
        velocities = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        return HookState(own, (common, velocities))

    def sum(
        self,
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        state: HookState,
        key: str,
    ) -> tuple[list[tf.Tensor], HookState]:
        """Return the sums with momentum, and the next velocities."""
        common, velocities = state.common
        sums, after = self.hook.sum(
            transport, tensors, HookState(state.own, common), key
        )
        velocities = [
            self.momentum * velocity + total
            for velocity, total in zip(velocities, sums, strict=True)
        ]
        sums = [
            total + self.momentum * velocity
            for velocity, total in zip(velocities, sums, strict=True)
        ]
        return sums, HookState(after.own, (after.common, velocities))


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(StatefulHook):
    """Adds the rounding error of each gradient to the next one.

    Each rank stores its own rounding errors, which takes as much memory as its
    gradients. The rounding of the sums that are sent back is not compensated.
    For values that are not finite, no error is stored.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", 2014; Karimireddy et
    al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    2019.

    Attributes:
        hook: sums the gradients, and rounds wider dtypes.
        dtype: the dtype that it rounds to.

    Example:
        >>> ErrorFeedback(fp16_shards, tf.float16)
    """

    hook: CommunicationHook
    dtype: tf.DType

    def init(self, specs: Sequence[tf.TensorSpec]) -> HookState:
        """Return an error of zero for each gradient that is rounded."""
        errors = [
            tf.zeros(spec.shape, spec.dtype) if self._has_error(spec) else ()
            for spec in specs
        ]
        return HookState(own=errors)

    def _has_error(self, gradient: tf.Tensor | tf.TensorSpec) -> bool:
        known = gradient.shape.is_fully_defined()
        return known and is_rounded(gradient, self.dtype)

    def sum(
        self,
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        state: HookState,
        key: str,
    ) -> tuple[list[tf.Tensor], HookState]:
        """Return the sums of gradients and errors, and the next errors."""
        sent, errors = [], []
        for tensor, error in zip(tensors, state.own, strict=True):
            if self._has_error(tensor):
                tensor = tensor + error
                rounded = tf.cast(tf.cast(tensor, self.dtype), tensor.dtype)
                error = tensor - rounded
                error = tf.where(tf.math.is_finite(error), error, 0)
            sent.append(tensor)
            errors.append(error)
        return self.hook(transport, sent, key), HookState(own=errors)


@dataclasses.dataclass(frozen=True)
class PowerSGD(StatefulHook):
    """Sends the factors P and Q of a low-rank approximation of the sum.

    A gradient of shape [..., columns] is taken as a matrix M of N rows. With
    the Q of the step before, P is the orthonormal basis of the sum of M Q over
    the ranks, [N, rank]; Q becomes the sum of the transposed M times P,
    [columns, rank]; the sum of M is approximated by P times the transposed Q.
    The approximation error of a rank's M is added to its next M (error
    feedback), which takes as much memory as the gradients.

    Vectors, and matrices whose factors would have more than half as many
    elements, are summed losslessly. Ranks with the same kind of processor get
    bit-identical sums.

    Attributes:
        rank: columns of both factors; more are more exact, but send more.

    Raises:
        TowerError: a rank below 1, or integer gradients.

    Example:
        >>> keras_towers.HorovodStrategy(compression=PowerSGD(rank=8))
    """

    rank: int = 4

    def __post_init__(self) -> None:
        rank = self.rank
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise TowerError(
                f"rank={rank!r} of PowerSGD is not allowed: give 1 or more "
                "columns."
            )

    def init(self, specs: Sequence[tf.TensorSpec]) -> HookState:
        """Return an error of zero and a Q for each gradient with factors."""
        check_floats(specs)
        errors, factors = [], []
        for index, spec in enumerate(filter(self._shrinks, specs)):
            columns: Any = spec.shape[-1]
            rows = spec.shape.num_elements() // columns
            dtype = _dtype_of_factors(spec)
            errors.append(tf.zeros([rows, columns], dtype))
            factors.append(
                tf.random.stateless_normal(
                    [columns, self.rank], (self.rank, index), dtype=dtype
                )
            )
        return HookState(own=errors, common=factors)

    def _shrinks(self, gradient: tf.Tensor | tf.TensorSpec) -> bool:
        """Whether factorizing a gradient at least halves its elements."""
        shape = gradient.shape
        if not shape.is_fully_defined() or len(shape) < 2:
            return False
        elements, columns = shape.num_elements(), shape[-1]
        if not elements:
            return False
        return 2 * self.rank * (elements // columns + columns) <= elements

    def sum(
        self,
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        state: HookState,
        key: str,
    ) -> tuple[list[tf.Tensor], HookState]:
        """Return the approximate sums, and the next errors and factors."""
        after = state

        def by_factors(chosen: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            nonlocal after
            sums, after = _sum_factors(transport, chosen, state, key)
            return sums

        sums = sum_separately(
            transport, tensors, key, self._shrinks, by_factors
        )
        return sums, after


def _dtype_of_factors(gradient: tf.Tensor | tf.TensorSpec) -> tf.DType:
    is_short = gradient.dtype.size < tf.float32.size
    return tf.float32 if is_short else gradient.dtype


def _sum_factors(
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    state: HookState,
    key: str,
) -> tuple[list[tf.Tensor], HookState]:
    matrices = [
        tf.cast(tf.reshape(tensor, error.shape), error.dtype) + error
        for tensor, error in zip(tensors, state.own, strict=True)
    ]
    sums = transport.all_reduce(
        [tf.matmul(m, q) for m, q in zip(matrices, state.common, strict=True)],
        f"{key}.p",
    )
    bases = [tf.linalg.qr(total).q for total in sums]
    projections = [
        tf.matmul(m, basis, transpose_a=True)
        for m, basis in zip(matrices, bases, strict=True)
    ]
    sums = transport.all_reduce(projections, f"{key}.q")
    after = HookState(own=[], common=[])
    for matrix, basis, projection, total, error, factor in zip(
        matrices, bases, projections, sums, *state, strict=True
    ):
        rest = matrix - tf.matmul(basis, projection, transpose_b=True)
        # Ignore steps that overflow. Keep nonzero factors, too: from zero, as
        # for units that are still idle, a factor would never recover.
        finite = tf.reduce_all(tf.math.is_finite(total))
        usable = finite & tf.reduce_any(total != 0, axis=0)
        after.own.append(tf.where(finite, rest, error))
        after.common.append(tf.where(usable, total, factor))
    sums = [
        tf.cast(tf.reshape(tf.matmul(p, q, transpose_b=True), t.shape), t.dtype)
        for p, q, t in zip(bases, sums, tensors, strict=True)
    ]
    return sums, after
