"""Environment variables that tell a rank its place in the job."""

from __future__ import annotations

import os
from typing import Any

from keras_towers.rendezvous import SECRET, token

SEED = "KERAS_TOWERS_SEED"


def process_environment(seed: int | None) -> dict[str, str]:
    """Variables for every process of a job of whatever kind."""
    environment = {
        # Show output immediately, and unchanged under an ASCII-only locale.
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    if seed is not None:
        environment[SEED] = str(seed)
        # Otherwise the iteration order of a set of strings would differ
        # between ranks.
        environment["PYTHONHASHSEED"] = os.environ.get(
            "PYTHONHASHSEED", str(seed)
        )
    return environment


def job_environment(
    *,
    rendezvous: str,
    port: int,
    secret: str,
    interface: str | None,
    stall_warning_s: int,
    stall_shutdown_s: int,
    seed: int | None,
    elastic: bool,
) -> dict[str, str]:
    """Variables for every rank of the job."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if direct != "*":  # It means all only where it stands alone.
        direct = f"{direct},{rendezvous}" if direct else rendezvous
    environment = {
        # Horovod's clients put "http://" before this and the port and the path
        # behind it: with the token in between, they all send it.
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{rendezvous}:{port}/{token(secret)}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        SECRET: secret,
        # Horovod's own Python code would ask a proxy for the server.
        "no_proxy": direct,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall_warning_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(stall_shutdown_s),
        **process_environment(seed),
    }
    if stall_warning_s == 0:
        environment["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    if interface:
        environment["HOROVOD_GLOO_IFACE"] = interface
        environment["NCCL_SOCKET_IFNAME"] = interface
    if elastic:
        environment["HOROVOD_ELASTIC"] = "1"
    if "HOROVOD_GLOO_TIMEOUT_SECONDS" not in os.environ:
        # How long a rank waits for others that died unnoticed, and for the
        # last one to start. In an elastic job the rendezvous waits for the
        # start. In other jobs the launcher detects deaths, and Horovod's 30 s
        # are too short when many ranks load TensorFlow at once.
        patience_s = max(300, stall_shutdown_s + 60)
        environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = (
            "10" if elastic else str(patience_s)
        )
    return environment


def slot_environment(slot: Any) -> dict[str, str]:
    """Variables for one rank, given Horovod's ``SlotInfo``."""
    return {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }
