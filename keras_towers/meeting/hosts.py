"""The hosts of a job, their slots, and the rank in each of them."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from keras_towers.errors import TowerError

_HOST = re.compile(r"([\w.-]+)(?:(?::|\s+slots\s*=\s*)(\d+))?")


def parse_hosts(text: str) -> dict[str, int]:
    """Parse ``host:slots,host:slots``; slots default to 1."""
    return read_entries(text.split(","), "-H takes host:slots,host:slots,...")


def parse_hostfile(path: Path) -> dict[str, int]:
    """Parse lines like ``host slots=2`` or ``host:2``; # starts a comment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TowerError(f"cannot read the hostfile {path}: {error}") from None
    lines = [line.split("#")[0] for line in text.splitlines()]
    return read_entries(
        filter(str.strip, lines),
        f"the hostfile {path} takes lines like 'host slots=2'",
    )


def read_entries(
    entries: Iterable[str], form: str, slots: int = 1
) -> dict[str, int]:
    """Read a host and its slots from each entry."""
    hosts: dict[str, int] = {}
    for entry in map(str.strip, entries):
        match = _HOST.fullmatch(entry)
        if not match:
            raise TowerError(f"{form}, not '{entry}'")
        name, count = match[1], int(match[2] or slots)
        if name in hosts:
            raise TowerError(f"the host {name} is given twice")
        if count < 1:
            raise TowerError(f"the host {name} needs at least one slot")
        hosts[name] = count
    if not hosts:
        raise TowerError(f"{form}; no host was given")
    return hosts


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one rank, with Horovod's names in Horovod's order."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the rank."""
        told = dataclasses.asdict(self)
        return {f"HOROVOD_{n.upper()}": str(v) for n, v in told.items()}

    def told(self) -> str:
        """The place as a worker of an elastic job is told it."""
        return ",".join(map(str, dataclasses.astuple(self)[1:]))

    @classmethod
    def heard(cls, hostname: str, told: str) -> Slot:
        """The place that a worker was told."""
        return cls(hostname, *map(int, told.split(",")))


NO_PLACE: str = Slot("", *[-1] * 6).told()
"""The answer to a worker that takes no part any more."""


def slots(hosts: Sequence[str]) -> list[Slot]:
    """The place of each rank."""
    on_host: dict[str, list[int]] = collections.defaultdict(list)
    for rank, host in enumerate(hosts):
        on_host[host].append(rank)
    # Of each host that has as many ranks, one.
    across: collections.Counter[int] = collections.Counter()
    places: dict[int, tuple[int, int]] = {}
    for ranks in on_host.values():
        for local, rank in enumerate(ranks):
            places[rank] = local, across[local]
            across[local] += 1
    return [
        Slot(
            hostname=host,
            rank=rank,
            size=len(hosts),
            local_rank=places[rank][0],
            local_size=len(on_host[host]),
            cross_rank=places[rank][1],
            cross_size=across[places[rank][0]],
        )
        for rank, host in enumerate(hosts)
    ]


def assign(hosts: Mapping[str, int], most: int | None) -> list[Slot]:
    """The places of at most so many ranks: one host after another is filled."""
    everywhere = [host for host, count in hosts.items() for _ in range(count)]
    return slots(everywhere[:most])
