"""The environment variables by which a launcher tells ranks of their job.

``launching/rank_process.py`` passes the launcher's own ones to other hosts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.settings import ENV_SECRET, ENV_SEED, ENV_STORE
from keras_towers.jobs.rendezvous import store
from keras_towers.jobs.rendezvous.signatures import Endpoint, path_token

INTERFACE = "HOROVOD_GLOO_IFACE"
"""Names the network interface between ranks."""


def process_environment(
    stall_warning_s: int,
    stall_shutdown_s: int,
    seed: int | None = None,
    device_memory: str | None = None,
) -> dict[str, str]:
    """Return variables for every process of a job, from options of ``Job``."""
    environment = {
        # Show output immediately, and unchanged under an ASCII-only locale.
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        # From TensorFlow's C++ code, show warnings and errors only.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        settings.ENV_STALL_WARNING: str(stall_warning_s),
        settings.ENV_STALL_SHUTDOWN: str(stall_shutdown_s),
    }
    if stall_warning_s == 0:
        environment[settings.ENV_STALL_DISABLE] = "1"
    if device_memory is not None:
        environment[settings.ENV_DEVICE_MEMORY] = device_memory
    if seed is not None:
        environment[ENV_SEED] = str(seed)
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        # The iteration order of a set of strings would differ between ranks.
        environment["PYTHONHASHSEED"] = "0"
    return environment


def job_environment(
    endpoint: Endpoint, common: Mapping[str, str], interface: str | None
) -> dict[str, str]:
    """Return the variables by which a process finds its store.

    They include those of Horovod's ranks.
    """
    host, port = endpoint.address, endpoint.port
    no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if no_proxy != "*":  # An asterisk means all hosts only if it is alone.
        no_proxy = f"{no_proxy},{host}" if no_proxy else host
    environment = {
        # Horovod's clients build a URL from "http://", this address, the port
        # and a path: with the token in the address, each request carries it.
        store.HOROVODS_ADDRESS: (
            f"{host}:{port}/{path_token(endpoint.secret)}"
        ),
        store.HOROVODS_PORT: str(port),
        ENV_STORE: f"{host}:{port}",
        ENV_SECRET: endpoint.secret,
        # A rank may have started the launcher.
        settings.ENV_PLACE: "",
        # Horovod's Python code would send its requests to a proxy.
        "no_proxy": no_proxy,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **common,
    }
    if interface:
        environment[INTERFACE] = interface
        environment["NCCL_SOCKET_IFNAME"] = interface
    if "HOROVOD_GLOO_TIMEOUT_SECONDS" not in os.environ:
        # How long a rank waits for another one that died unnoticed, and for the
        # last one to start. The launcher notices deaths, and Horovod's default
        # of 30 s is too short if many ranks load TensorFlow at once.
        timeout_s = max(300, int(common[settings.ENV_STALL_SHUTDOWN]) + 60)
        environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(timeout_s)
    return environment


def meeting_limit_s() -> int:
    """Return the seconds within which all processes of a job must start."""
    return seconds(
        settings.ENV_RENDEZVOUS_TIMEOUT, settings.RENDEZVOUS_TIMEOUT_S
    )


def seconds(name: str, default: int) -> int:
    """Read a number of seconds from a variable."""
    text = os.environ.get(name, "")
    try:
        return round(float(text)) if text else default
    except (ValueError, OverflowError):
        raise TowerError(
            f"{name} is {text!r}: give a number of seconds."
        ) from None
