"""Checks that all ranks of a job are about to do the same thing.

Ranks exchange plain values and compare them. ``fit`` does so for the arguments
of a call and for variables (``fit/rank_agreement.py``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from keras_towers.errors import TowerError
from keras_towers.rendezvous.liveness import describe_each

OTHER_STEP: str = "the ranks do not have the same step"
"""How the message of a TensorFlow error begins if the ranks' steps differ."""
_SHOWN_CONSTANTS = 3


class Peers(Protocol):
    """Connected ranks that exchange values."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def local_size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather values from all ranks on all ranks. Eager; no pickles."""
        ...


def gather(peers: Peers, value: Any, where: str) -> list[Any]:
    """Gather values from all ranks, which must be at the same point.

    Without the check, ranks at different points could meet in the same gather,
    and each would take the other's values for the ones that it expects.

    Args:
        peers: the connected ranks.
        value: this rank's value, plain data.
        where: what this rank does, to follow "rank 0" in a message.
    """
    gathered = peers.gather_objects((where, value))
    if any(point != where for point, _ in gathered):
        points = {f"rank {r}": point for r, (point, _) in enumerate(gathered)}
        raise TowerError(
            f"the ranks do different things: {describe_each(points)}. Every "
            "rank has to call the same methods in the same order."
        )
    return [value for _, value in gathered]


def describe_ranks(values: Sequence[Any], separator: str = ", ") -> str:
    """Describe the values of all ranks."""
    return separator.join(f"rank {r}: {v}" for r, v in enumerate(values))


def differing_settings(
    ranks: Sequence[Mapping[str, Any]],
) -> dict[str, list[Any]]:
    """Return the settings that differ between ranks, with all their values."""
    values = {
        name: [settings.get(name, "not given") for settings in ranks]
        for name in sorted(set().union(*ranks))
    }
    return {n: v for n, v in values.items() if any(x != v[0] for x in v)}


def describe_gradients(
    ranks: Sequence[Collection[tuple[Hashable, str]]],
) -> str:
    """Describe the gradients that some ranks lack."""
    return f"the ranks do not have the same gradients. {_not_on_all(ranks)}"


def describe_steps(
    ranks: Sequence[Collection[tuple[Hashable, str]]],
    constants: Sequence[Sequence[tuple[str, int]]],
) -> str:
    """Describe how the steps of ranks differ.

    Args:
        ranks: for each rank, the exchanges, gradients and other variables of
            the steps that some ranks do not have: a key to compare, and a name.
        constants: for each rank, the constants of its steps: a description, and
            the number of equal ones before it.
    """
    texts = []
    if any(ranks):
        texts.append(
            f"the ranks have different steps. {_not_on_all(ranks)} A step must "
            "not print or write summaries on rank 0 only: if it does so on all "
            "ranks, it happens once."
        )
    if len(set(map(frozenset, constants))) > 1 or not texts:
        texts.append(describe_constants(constants))
    return " Besides, ".join(texts)


def _not_on_all(ranks: Sequence[Collection[tuple[Hashable, str]]]) -> str:
    return (
        f"{_only_on(ranks, ', ')}. Every rank has to run the same model, and "
        "to compute the same loss for the same variables."
    )


def describe_constants(ranks: Sequence[Sequence[tuple[str, int]]]) -> str:
    """Describe the constants of a step that differ between ranks."""
    values = [[(key, key[0]) for key in own] for own in ranks]
    return (
        "the ranks have traced different constants into their steps. "
        f"{_only_on(values, '; ', _SHOWN_CONSTANTS)}. Python and NumPy have "
        "computed them: give their random generators the same seed on every "
        "rank (keras.utils.set_random_seed), or keep what is drawn in a "
        "variable, which all ranks take from rank 0."
    )


def _only_on(
    ranks: Sequence[Collection[tuple[Hashable, str]]],
    separator: str,
    shown: int | None = None,
) -> str:
    """Describe what some ranks lack.

    Args:
        ranks: for each rank, what it has: a key to compare, and its name.
        separator: stands between two names.
        shown: the largest number of names for each rank; None: all.
    """
    common = set.intersection(*({key for key, _ in own} for own in ranks))
    extra = [
        sorted({name for key, name in own if key not in common})
        for own in ranks
    ]
    named = [separator.join(names[:shown]) or "none" for names in extra]
    return f"Only on {describe_ranks(named, '; only on ')}"


def without_numbers(path: str) -> str:
    """Strip the numbers that make Keras names unique from a path.

    The numbers count what a process has built, and rank 0 may have built more
    models than the other ranks.
    """
    return re.sub(r"_\d+(?=[/_ ]|$)", "", path)
