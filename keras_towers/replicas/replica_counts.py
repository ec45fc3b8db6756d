"""Counts of gradients: of an update, and of each replica."""

from __future__ import annotations

import dataclasses

from keras_towers.foundation.errors import TowerError
from keras_towers.replicas.accumulators import MAX_GRADIENTS


@dataclasses.dataclass(frozen=True)
class Quorum:
    """R gradients are averaged for an update, computed by T replicas.

    Attributes:
        replicas: T.
        aggregate: R.
        shared: whether all replicas take tokens from one queue.
    """

    replicas: int
    aggregate: int
    shared: bool

    def __post_init__(self) -> None:
        if self.aggregate < 1:
            raise TowerError(
                f"replicas_to_aggregate={self.aggregate} is not allowed: "
                "give the number of gradients in an update, 1 or more."
            )
        if self.replicas * self.max_per_replica > MAX_GRADIENTS:
            tokens = "shared" if self.shared else "per_replica"
            raise TowerError(
                f"{self.replicas} replicas, with {self.aggregate} gradients in "
                f"an update and tokens={tokens!r}, are too many: at most "
                f"{MAX_GRADIENTS} gradients can be distinguished."
            )

    @property
    def quotas(self) -> list[int]:
        """For each of T replicas, its number of gradients in an update."""
        # 1 each if there are replicas to spare, else R in total.
        if self.replicas >= self.aggregate:
            return [1] * self.replicas
        each, more = divmod(self.aggregate, self.replicas)
        return [each + 1] * more + [each] * (self.replicas - more)

    @property
    def max_per_replica(self) -> int:
        """The largest number of gradients of an update from one replica."""
        if self.shared:
            return max(self.aggregate, self.replicas)
        return max(self.quotas)

    @property
    def one_each(self) -> bool:
        """Whether every replica computes one gradient of each update."""
        return not self.shared and self.replicas == self.aggregate

    @property
    def may_drop(self) -> bool:
        """Whether gradients can come too late."""
        return self.shared or self.replicas > self.aggregate


@dataclasses.dataclass(frozen=True)
class ReplicaCounts:
    """Gradients of each of T replicas, since the beginning of a ``fit``.

    Attributes:
        updates: the number of averages that the optimizer applied: the global
            step.
        used: the number of gradients of each replica that entered an average.
        dropped: the number of gradients of each replica that came too late.

    Example:
        >>> with kt.SyncReplicasStrategy(replicas_to_aggregate=3) as strategy:
        ...     model.fit(x, y)
        >>> print(strategy.counts)
        94 updates; used by replica: 94 94 93 12; dropped: 0 0 1 8
    """

    updates: int
    used: tuple[int, ...]
    dropped: tuple[int, ...]

    @classmethod
    def none(cls, replicas: int) -> ReplicaCounts:
        """The counts before the first ``fit``."""
        return cls(0, (0,) * replicas, (0,) * replicas)

    def __str__(self) -> str:
        used = " ".join(map(str, self.used))
        dropped = " ".join(map(str, self.dropped))
        return (
            f"{self.updates} updates; used by replica: {used}; "
            f"dropped: {dropped}"
        )
