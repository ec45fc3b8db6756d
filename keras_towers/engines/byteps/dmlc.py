"""The environment variables with which BytePS's processes find one another.

If one is missing or wrong, BytePS waits forever or aborts without a traceback,
so they are checked first.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous.network import is_local_address

ROLE = "DMLC_ROLE"
WORKER_ID = "DMLC_WORKER_ID"
NUM_WORKER = "DMLC_NUM_WORKER"
NUM_SERVER = "DMLC_NUM_SERVER"
ROOT_URI = "DMLC_PS_ROOT_URI"
ROOT_PORT = "DMLC_PS_ROOT_PORT"
NODE_HOST = "DMLC_NODE_HOST"
LOCAL_RANK = "BYTEPS_LOCAL_RANK"
LOCAL_SIZE = "BYTEPS_LOCAL_SIZE"

SOCKETS = "BYTEPS_SOCKET_PATH"
_ASYNCHRONOUS = "BYTEPS_ENABLE_ASYNC"
_HOW = (
    "`keras-towers run -np 2 --strategy byteps script.py` sets all of them; to "
    "start processes by hand see the page on BytePS in the documentation."
)


def check_worker(environment: Mapping[str, str] = os.environ) -> str | None:
    """Check a worker's variables and describe it; None if there are none."""
    if not any(name.startswith("DMLC_") for name in environment):
        return None
    workers, servers, root, port = _job(environment, ["worker"], WORKER_ID)
    number = _number(environment, WORKER_ID, 0, workers)
    local_size = _number(environment, LOCAL_SIZE, 1, default="1")
    _number(environment, LOCAL_RANK, 0, local_size, default="0")
    if environment.get(_ASYNCHRONOUS, "0") != "0":
        raise _wrong(
            f"with {_ASYNCHRONOUS}, servers ignore which step a gradient "
            "belongs to, and no strategy of keras_towers supports that: unset "
            "it for all processes"
        )
    return (
        f"worker {number} of {workers}, with {servers} server(s) and the "
        f"scheduler at {root}:{port}"
    )


def check_server(environment: Mapping[str, str] = os.environ) -> None:
    """Check the environment of the scheduler or a server."""
    _, _, root, port = _job(environment, ["scheduler", "server"])
    if environment[ROLE] == "scheduler":
        try:
            with socket.socket() as probe:
                # A port that was in use a moment ago counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((root, port))
        except OSError as error:
            raise _wrong(
                f"the scheduler cannot listen at {ROOT_URI}={root} and "
                f"{ROOT_PORT}={port} ({error.strerror}): give an address of "
                "this machine, and a free port"
            ) from None


def set_defaults(worker: str | None) -> None:
    """Set the remaining variables that BytePS reads, unless the user has.

    Args:
        worker: the result of ``check_worker``.
    """
    if worker is None:
        # BytePS needs these even if there is only one process.
        os.environ.update({ROLE: "worker", NUM_WORKER: "1", WORKER_ID: "0"})
        os.environ.setdefault(NUM_SERVER, "0")
    else:
        # Otherwise a single worker would not use the servers.
        os.environ.setdefault("BYTEPS_FORCE_DISTRIBUTED", "1")
    os.environ.setdefault(LOCAL_RANK, "0")
    os.environ.setdefault(LOCAL_SIZE, "1")
    # BytePS's other ways to assign tensors to servers read freed memory.
    os.environ.setdefault("BYTEPS_KEY_HASH_FN", "naive")
    if os.environ[LOCAL_SIZE] == "1" and SOCKETS not in os.environ:
        # For sockets between the processes of a machine; this is its only one.
        path = tempfile.mkdtemp(prefix="keras-towers-byteps-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        os.environ[SOCKETS] = path


def _job(
    environment: Mapping[str, str], roles: Sequence[str], *more: str
) -> tuple[int, int, str, int]:
    """The number of workers and servers, and the scheduler's host and port.

    Args:
        environment: the variables to check.
        roles: the roles that this process may have.
        *more: names of further variables that have to be set.
    """
    role = environment.get(ROLE)
    if role not in roles:
        raise _wrong(
            f"{ROLE} is {role!r}, but for this process it must be "
            f"{' or '.join(map(repr, roles))}"
        )
    needed = *more, NUM_WORKER, NUM_SERVER, ROOT_URI, ROOT_PORT
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise _wrong(f"not set: {', '.join(missing)}")
    workers = _number(environment, NUM_WORKER, 1)
    servers = _number(environment, NUM_SERVER, 1)
    port = _number(environment, ROOT_PORT, 1)
    root = environment[ROOT_URI]
    _check_addresses(root, environment.get(NODE_HOST))
    return workers, servers, root, port


def _check_addresses(host: str, node_host: str | None) -> None:
    """Check that the scheduler and this process can reach each other."""
    root = _resolve(ROOT_URI, host)
    if node_host is None:
        return
    address = _resolve(NODE_HOST, node_host)
    if not is_local_address(address):
        raise _wrong(
            f"{NODE_HOST}={node_host} must be an address of this machine"
        )
    if address.startswith("127.") != root.startswith("127."):
        raise _wrong(
            f"{NODE_HOST}={node_host} and {ROOT_URI}={host}: give two loopback "
            "addresses, or none"
        )


def _resolve(name: str, host: str) -> str:
    """The IPv4 address of a host, which a variable names."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise _wrong(
            f"{name}={host} cannot be resolved on this machine ({error})"
        ) from None


def _number(
    environment: Mapping[str, str],
    name: str,
    least: int,
    end: int = 1 << 16,
    *,
    default: str = "",
) -> int:
    """Read a whole number, from ``least`` to ``end - 1``, from a variable."""
    text = environment.get(name, default)
    if not text.isdecimal() or not least <= int(text) < end:
        raise _wrong(
            f"{name}={text!r} must be a whole number from {least} to {end - 1}"
        )
    return int(text)


def _wrong(what: str) -> TowerError:
    return TowerError(f"BytePS cannot start: {what}. {_HOW}")
