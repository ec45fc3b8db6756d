"""Commands on other machines, by ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from keras_towers import settings, subprocesses
from keras_towers.errors import TowerError


def ssh_command(host: str, port: int | None, command: list[str]) -> list[str]:
    """The command that runs ``command`` on another machine."""
    # Host keys and user names are left to the user's ssh configuration.
    return [
        "ssh",
        # Never prompt: a rank has no terminal.
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={settings.SSH_CONNECT_S}"),
        # It ends after three signs of life that were not answered.
        *("-o", f"ServerAliveInterval={settings.LOST_S / 4:.0f}"),
        *(["-p", str(port)] if port else []),
        host,
        shlex.join(command),
    ]


def check_reachable(hosts: Collection[str], port: int | None = None) -> None:
    """Check, in parallel, that ssh reaches hosts with this working folder."""
    folder = os.getcwd()

    def check(host: str) -> None:
        limit_s = 2 * settings.SSH_CONNECT_S
        command = ssh_command(host, port, ["test", "-d", folder])
        try:
            done = subprocesses.run(command, limit_s)
        except FileNotFoundError:
            raise TowerError(
                f"cannot reach host {host} by ssh: there is no ssh command on "
                "this machine"
            ) from None
        if done.code == 0:
            return
        if done.code == 1:  # That of test; ssh has 255.
            raise TowerError(
                f"there is no folder {folder} on host {host}: ranks run in the "
                "launcher's working folder, which all hosts have to have"
            )
        said = done.stderr.strip().splitlines() or [f"exit code {done.code}"]
        why = f"no answer in {limit_s} s" if done.code is None else said[-1]
        raise TowerError(f"cannot reach host {host} by ssh: {why}")

    if hosts:
        with ThreadPoolExecutor(min(32, len(hosts))) as pool:
            list(pool.map(check, hosts))
