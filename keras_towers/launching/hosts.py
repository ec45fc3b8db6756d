"""The hosts of a job: parsing them, which are local, ssh."""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from keras_towers.errors import TowerError

LOOPBACK = "127.0.0.1"
_SSH_CONNECT_S = 10
_HOST = re.compile(r"([\w.-]+)(?::(\d+))?")
_HOSTFILE_LINE = re.compile(r"([\w.-]+)(?:(?::|\s+slots\s*=\s*)(\d+))?")


def parse_hosts(text: str) -> dict[str, int]:
    """Parse ``host:slots,host:slots``; slots default to 1.

    Raises:
        TowerError: the syntax is wrong.
    """
    entries = [entry.strip() for entry in text.split(",")]
    return read_entries(entries, "-H takes host:slots,host:slots,...")


def parse_hostfile(path: Path) -> dict[str, int]:
    """Parse lines like ``host slots=2`` or ``host:2``; # starts a comment.

    Raises:
        TowerError: the file cannot be read, or its syntax is wrong.
    """
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
    """Read hosts and their slots, one from each entry.

    Args:
        entries: the texts.
        form: says who gave them, and what they have to look like.
        pattern: what they have to look like.
        slots: of an entry without a number.

    Raises:
        TowerError: one of them looks otherwise.
    """
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


def resolve(host: str) -> str:
    """The IPv4 address of a host.

    Raises:
        TowerError: the host is unknown.
    """
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise TowerError(f"unknown host {host}: {error}") from None


def is_local(host: str) -> bool:
    """Whether a host is this machine.

    Raises:
        TowerError: the host is unknown.
    """
    address = resolve(host)
    if ipaddress.ip_address(address).is_loopback:
        return True
    # Only addresses of this machine can be bound.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def meeting_address(remote: Iterable[str]) -> str:
    """The address of this machine that all ranks can reach.

    Args:
        remote: the hosts that are other machines; loopback if there are none.

    Raises:
        TowerError: there is no route to the first of them.
    """
    for host in remote:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # Sends nothing, only looks up a route.
                probe.connect((resolve(host), 9))
            except OSError as error:
                raise TowerError(f"no route to host {host}: {error}") from None
            return str(probe.getsockname()[0])
    return LOOPBACK


def meeting_point(
    interface: str | None, remote: Iterable[str]
) -> tuple[str, str | None]:
    """The rendezvous address, and the interface of each rank if known.

    Args:
        interface: the one to use; None: detected.
        remote: the hosts that are other machines.

    Raises:
        TowerError: the interface does not exist, or a host has no route.
    """
    addresses = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    if interface:
        if interface not in addresses:
            raise TowerError(
                f"there is no network interface {interface} with an IPv4 "
                f"address here; choose from {', '.join(sorted(addresses))}"
            )
        return addresses[interface], interface
    if remote:
        # Interface names differ between hosts: each rank's agent looks up the
        # one with a route to this machine.
        return meeting_address(remote), None
    local = (n for n, address in addresses.items() if address == LOOPBACK)
    return LOOPBACK, next(local, None)


def ssh_command(host: str, port: int | None, command: list[str]) -> list[str]:
    """The command that runs ``command`` on another machine.

    Host keys and user names are left to the user's ssh configuration.
    """
    return [
        "ssh",
        # Never prompt: a rank has no terminal.
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={_SSH_CONNECT_S}"),
        # Detect a dead machine within half a minute.
        *("-o", "ServerAliveInterval=10"),
        *(["-p", str(port)] if port else []),
        host,
        shlex.join(command),
    ]


def check_reachable(hosts: Iterable[str], port: int | None = None) -> None:
    """Try ssh to all hosts in parallel.

    Raises:
        TowerError: a host cannot be reached.
    """

    def reason(host: str) -> str | None:
        try:
            done = subprocess.run(
                ssh_command(host, port, ["true"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=2 * _SSH_CONNECT_S,
            )
        except FileNotFoundError:
            return "there is no ssh command on this machine"
        except subprocess.TimeoutExpired:
            return f"no answer in {2 * _SSH_CONNECT_S} s"
        if done.returncode == 0:
            return None
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"exit code {done.returncode}"

    hosts = list(hosts)
    if not hosts:
        return
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        for host, why in zip(hosts, pool.map(reason, hosts), strict=True):
            if why:
                raise TowerError(f"cannot reach host {host} by ssh: {why}")
