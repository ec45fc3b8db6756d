"""Environment variables that tell a rank its place in the job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.rendezvous.store import (
    HOROVODS_ADDRESS,
    HOROVODS_PORT,
    Endpoint,
    token,
)
from keras_towers.settings import SECRET, SEED, STORE

_ELASTIC = "HOROVOD_ELASTIC"


def is_elastic() -> bool:
    """Whether the ranks of this process's job come and go."""
    return os.environ.get(_ELASTIC, "0") not in ("", "0")


def process_environment(
    stall_warning_s: int, stall_shutdown_s: int, seed: int | None = None
) -> dict[str, str]:
    """Variables for every process of a job, from the options of ``Job``."""
    environment = {
        # Show output immediately, and unchanged under an ASCII-only locale.
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        # TensorFlow's C++ code tells warnings and errors, and no news.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        settings.STALL_WARNING: str(stall_warning_s),
        settings.STALL_SHUTDOWN: str(stall_shutdown_s),
    }
    if stall_warning_s == 0:
        environment[settings.STALL_DISABLE] = "1"
    if seed is not None:
        environment[SEED] = str(seed)
        # Otherwise the iteration order of a set of strings would differ
        # between ranks.
        environment["PYTHONHASHSEED"] = os.environ.get(
            "PYTHONHASHSEED", str(seed)
        )
    return environment


def job_environment(
    endpoint: Endpoint,
    common: Mapping[str, str],
    interface: str | None,
    elastic: bool = False,
) -> dict[str, str]:
    """Variables for every rank of a job over Horovod or BytePS."""
    host, port = endpoint.address, endpoint.port
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if direct != "*":  # It means all only where it stands alone.
        direct = f"{direct},{host}" if direct else host
    environment = {
        # Horovod's clients put "http://" before this and the port and the path
        # behind it: with the token in between, they all send it.
        HOROVODS_ADDRESS: f"{host}:{port}/{token(endpoint.secret)}",
        HOROVODS_PORT: str(port),
        STORE: f"{host}:{port}",
        SECRET: endpoint.secret,
        # Horovod's own Python code would ask a proxy for the server.
        "no_proxy": direct,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **common,
    }
    if interface:
        environment["HOROVOD_GLOO_IFACE"] = interface
        environment["NCCL_SOCKET_IFNAME"] = interface
    if elastic:
        environment[_ELASTIC] = "1"
    if "HOROVOD_GLOO_TIMEOUT_SECONDS" not in os.environ:
        # How long a rank waits for others that died unnoticed, and for the
        # last one to start. In an elastic job the rendezvous waits for the
        # start. In other jobs the launcher detects deaths, and Horovod's 30 s
        # are too short when many ranks load TensorFlow at once.
        patience_s = max(300, int(common[settings.STALL_SHUTDOWN]) + 60)
        environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = (
            "10" if elastic else str(patience_s)
        )
    return environment


def seconds(name: str, default: int) -> int:
    """The number of seconds in a variable."""
    text = os.environ.get(name, "")
    try:
        return round(float(text)) if text else default
    except ValueError:
        raise TowerError(f"{name} is {text!r}: give seconds.") from None
