"""Chooses the results to keep, rather than recompute."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping

ALWAYS = math.inf
"""The user of what is needed in any case."""


@dataclasses.dataclass(frozen=True)
class RematLimits:
    """The limits of what may be recomputed.

    Attributes:
        limit: the bytes of a tower for which as little as possible is computed
            again, or as needs least if nothing suffices; with 0 it is as
            much as is worth its time.
        most_work: the part of the step's work that may be computed again.
    """

    limit: float = math.inf
    most_work: float = math.inf


KEEP_ALL = RematLimits()


def worth_keeping(
    users: Mapping[int, Collection[float]],
    work: Mapping[int, float],
    prices: Mapping[int, float],
) -> set[int]:
    """Return which results to keep.

    If a result is kept, nothing is computed for it: neither it, nor what only
    it needs. Of results that are needed for one another, one is kept.

    Args:
        users: for the place in order of what would be computed again, those
            after it that need it, or ``ALWAYS``.
        work: how much each is to compute.
        prices: how much work it costs to keep each.
    """
    # The next one that all ways from a result to its users lead through:
    # dominators, which are few steps apart.
    next_: dict[float, float] = {ALWAYS: ALWAYS}
    order = sorted(users)
    for place in reversed(order):
        first, *others = users[place]
        for other in others:
            while first != other:
                first, other = max(first, other), next_[min(first, other)]
        next_[place] = first
    needed = collections.defaultdict[float, float](float, work.items())
    gained = collections.defaultdict[float, float](float)
    keeps: set[int] = set()
    for place in order:
        own = needed[place] - prices[place]
        if own > gained[place]:
            keeps.add(place)
            gained[place] = own
        needed[next_[place]] += needed[place]
        gained[next_[place]] += gained[place]
    found: set[int] = set()
    covered: set[float] = set()
    for place in reversed(order):
        if next_[place] in covered:
            covered.add(place)
        elif place in keeps:
            found.add(place)
            covered.add(place)
    return found
