"""The smallest memory of the devices that train a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType

from keras_towers.fit.components import TowerConfig
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.transport.devices import memory_of, short_name

MARGIN = 0.1
"""Estimates that are wrong by less stop nothing."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """The smallest memory of the devices of all ranks.

    Attributes:
        size: its bytes.
        device: the name of the device.
        rank: its rank, of several; None: there is one.
        others: the bytes that it holds of other models.
    """

    size: int
    device: str
    rank: int | None
    others: int = 0

    @property
    def room(self) -> float:
        """The bytes that a model and its steps may take."""
        return self.size * (1 - MARGIN) - self.others

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.device}{rank} has {format_bytes(self.size)}"

    @classmethod
    def of(
        cls,
        config: TowerConfig,
        peers: Peers,
        others: Mapping[str, int] = MappingProxyType({}),
    ) -> Limit | None:
        """Return the limit for all ranks' devices; None: unknown. Collective.

        Args:
            config: the towers of this rank.
            peers: the ranks.
            others: the bytes that devices hold of other models, by short name.
        """
        mesh = [*itertools.chain(*config.mesh)]
        sizes = zip(memory_of(mesh), map(short_name, mesh), strict=True)
        known = [(n, name, others.get(name, 0)) for n, name in sizes if n]
        own = min(known, key=_left, default=None)
        where = "compares the memory of its devices"
        of_ranks = rank_checks.gather(peers, own, where)
        found = [(n, rank) for rank, n in enumerate(of_ranks) if n]
        if not found:
            return None
        (size, device, held), rank = min(found, key=lambda pair: _left(pair[0]))
        return cls(size, device, rank if peers.size > 1 else None, held)


def _left(memory: tuple[int, str, int]) -> int:
    """Return what a device has left, given its size and what it holds."""
    size, _, held = memory
    return size - held
