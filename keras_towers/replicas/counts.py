"""How many gradients of each replica were used, and how many dropped."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ReplicaCounts:
    """Gradients of each of T replicas, since the beginning of a ``fit``.

    Attributes:
        updates: how many averages were applied: the global step.
        used: gradients that entered an average, of each replica.
        dropped: gradients that came too late and were dropped, of each replica.

    Example:
        >>> with kt.SyncReplicasStrategy(replicas_to_aggregate=3) as strategy:
        ...     model.fit(x, y)
        >>> print(strategy.counts)
        94 updates; used by replica: 94 94 93 12; dropped: 0 0 1 8
    """

    updates: int
    used: tuple[int, ...]
    dropped: tuple[int, ...]

    def __str__(self) -> str:
        used = " ".join(map(str, self.used))
        dropped = " ".join(map(str, self.dropped))
        return (
            f"{self.updates} updates; used by replica: {used}; "
            f"dropped: {dropped}"
        )
