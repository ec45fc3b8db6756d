"""Whether the ranks of a job are about to do the same, and how they differ."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from keras_towers._imports import packages
from keras_towers.errors import TowerError


class Peers(Protocol):
    """Connected ranks that tell one another values.

    Attributes:
        rank: this process, 0 to size - 1.
        size: number of processes.
        local_rank: this process among those on its machine, from 0.
        local_size: number of processes on this machine.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def local_size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather values from all ranks on all ranks; eager only.

        ``keras_towers.transport.plain`` says which values. It does so for any
        transport, and unpickles nothing.
        """
        ...


def gather(peers: Peers, value: Any, where: str) -> list[Any]:
    """Gather values from all ranks, which have to be in one place."""
    # Ranks that do different things may wait for one another nevertheless, each
    # for something else, and would take the other's values for what they
    # wanted.
    told = peers.gather_objects((where, value))
    if any(there != where for there, _ in told):
        places = ", ".join(f"rank {r} {p}" for r, (p, _) in enumerate(told))
        raise TowerError(
            f"the ranks do different things: {places}. Every rank has to call "
            "the same methods in the same order."
        )
    return [value for _, value in told]


def each(values: Sequence[Any], separator: str = ", ") -> str:
    """The values of all ranks in words."""
    return separator.join(f"rank {r}: {v}" for r, v in enumerate(values))


def differing(
    ranks: Sequence[Mapping[str, Any]], missing: str = "not given"
) -> dict[str, list[Any]]:
    """The settings in which ranks differ, each with its value on every rank."""
    found = {
        name: [settings.get(name, missing) for settings in ranks]
        for name in sorted(set().union(*ranks))
    }
    return {n: v for n, v in found.items() if any(x != v[0] for x in v)}


def unlike_gradients(
    ranks: Sequence[Collection[tuple[Hashable, str]]],
) -> str:
    """Say which gradients not all ranks have."""
    common = set.intersection(*({kind for kind, _ in one} for one in ranks))
    odd = (
        sorted({name for kind, name in r if kind not in common}) for r in ranks
    )
    told = each([", ".join(own) or "no others" for own in odd], "; only on ")
    return (
        f"the ranks do not have the same gradients. Only on {told}. Every rank "
        "has to run the same model, and to compute the same loss for the same "
        "variables."
    )


def unnumbered(path: str) -> str:
    """A path without the numbers that make Keras names unique."""
    # They count what a process has built, and rank 0 may have built more models
    # than the others.
    return re.sub(r"_\d+(?=[/_ ]|$)", "", path)


@functools.cache
def versions() -> str:
    """The installed versions that have to be the same on all ranks."""
    import keras_towers

    tensorflow, keras = (
        ", ".join(packages(name).values()) for name in ("tensorflow", "keras")
    )
    return (
        f"TensorFlow {tensorflow}, Keras {keras} and "
        f"keras_towers {keras_towers.__version__}"
    )
