"""Commands on other machines, by ssh."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from keras_towers import settings
from keras_towers.errors import TowerError


def ssh_command(host: str, port: int | None, command: list[str]) -> list[str]:
    """The command that runs ``command`` on another machine."""
    # Host keys and user names are left to the user's ssh configuration.
    return [
        "ssh",
        # Never prompt: a rank has no terminal.
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={settings.SSH_CONNECT_S}"),
        # Detect a dead machine within half a minute.
        *("-o", "ServerAliveInterval=10"),
        *(["-p", str(port)] if port else []),
        host,
        shlex.join(command),
    ]


def check_reachable(hosts: Iterable[str], port: int | None = None) -> None:
    """Try ssh to all hosts in parallel."""

    def reason(host: str) -> str | None:
        try:
            done = subprocess.run(
                ssh_command(host, port, ["true"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=2 * settings.SSH_CONNECT_S,
            )
        except FileNotFoundError:
            return "there is no ssh command on this machine"
        except subprocess.TimeoutExpired:
            return f"no answer in {2 * settings.SSH_CONNECT_S} s"
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
