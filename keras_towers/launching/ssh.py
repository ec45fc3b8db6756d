"""Commands on other machines, by ssh."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Collection
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


def check_reachable(hosts: Collection[str], port: int | None = None) -> None:
    """Check, in parallel, that ssh reaches hosts with this working folder."""
    folder = os.getcwd()

    def check(host: str) -> None:
        try:
            done = subprocess.run(
                ssh_command(host, port, ["test", "-d", folder]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=2 * settings.SSH_CONNECT_S,
            )
        except FileNotFoundError:
            why = "there is no ssh command on this machine"
        except subprocess.TimeoutExpired:
            why = f"no answer in {2 * settings.SSH_CONNECT_S} s"
        else:
            if done.returncode == 0:
                return
            if done.returncode == 1:  # That of test; ssh has 255.
                raise TowerError(
                    f"there is no folder {folder} on host {host}: ranks run in "
                    "the launcher's working folder, which all hosts have to "
                    "have"
                )
            said = done.stderr.decode(errors="replace").strip().splitlines()
            why = said[-1] if said else f"exit code {done.returncode}"
        raise TowerError(f"cannot reach host {host} by ssh: {why}")

    if hosts:
        with ThreadPoolExecutor(min(32, len(hosts))) as pool:
            list(pool.map(check, hosts))
