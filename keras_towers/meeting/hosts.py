"""Hosts and their slots, as users and managers of clusters write them."""

from __future__ import annotations

import re
from pathlib import Path

from keras_towers.errors import TowerError

_HOST = re.compile(r"([\w.-]+)(?::(\d+))?")
_HOSTFILE_LINE = re.compile(r"([\w.-]+)(?:(?::|\s+slots\s*=\s*)(\d+))?")


def parse_hosts(text: str) -> dict[str, int]:
    """Parse ``host:slots,host:slots``; slots default to 1."""
    entries = [entry.strip() for entry in text.split(",")]
    return read_entries(entries, "-H takes host:slots,host:slots,...")


def parse_hostfile(path: Path) -> dict[str, int]:
    """Parse lines like ``host slots=2`` or ``host:2``; # starts a comment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TowerError(f"cannot read the hostfile {path}: {error}") from None
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return read_entries(
        [line for line in lines if line],
        f"the hostfile {path} takes lines like 'host slots=2'",
        _HOSTFILE_LINE,
    )


def read_entries(
    entries: list[str],
    form: str,
    pattern: re.Pattern[str] = _HOST,
    slots: int = 1,
) -> dict[str, int]:
    """Read a host and its slots from each entry."""
    hosts: dict[str, int] = {}
    for entry in entries:
        match = pattern.fullmatch(entry)
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
