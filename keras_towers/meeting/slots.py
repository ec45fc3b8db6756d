"""The places of a job's ranks on its hosts."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_towers.errors import TowerError


@dataclass(frozen=True)
class Slot:
    """The place of one rank; has the attributes of Horovod's ``SlotInfo``."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def slots(hosts: Sequence[str]) -> list[Slot]:
    """The place of each rank."""
    on_host: dict[str, list[int]] = collections.defaultdict(list)
    for rank, host in enumerate(hosts):
        on_host[host].append(rank)
    found = []
    for rank, host in enumerate(hosts):
        mine = on_host[host]
        local = mine.index(rank)
        # One of each host that has as many.
        across = [
            ranks[local] for ranks in on_host.values() if len(ranks) > local
        ]
        found.append(
            Slot(
                hostname=host,
                rank=rank,
                local_rank=local,
                cross_rank=across.index(rank),
                size=len(hosts),
                local_size=len(mine),
                cross_size=len(across),
            )
        )
    return found


def assign(hosts: Mapping[str, int], ranks: int) -> list[Slot]:
    """Assign ranks to hosts: fill one host after another."""
    everywhere = [host for host, count in hosts.items() for _ in range(count)]
    if ranks > len(everywhere):
        raise TowerError(
            f"{ranks} processes do not fit into the hosts' {len(everywhere)} "
            "slots: give -H host:slots,... with more slots, or a smaller -np"
        )
    return slots(everywhere[:ranks])
