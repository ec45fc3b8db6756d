"""The variables by which BytePS's processes find one another.

Where one is missing or wrong, BytePS waits for ever or aborts without a
traceback, so they are checked before.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence

from keras_towers.errors import TowerError
from keras_towers.rendezvous.network import is_local_address

ROLE = "DMLC_ROLE"
WORKER_ID = "DMLC_WORKER_ID"
NUM_WORKER = "DMLC_NUM_WORKER"
NUM_SERVER = "DMLC_NUM_SERVER"
ROOT_URI = "DMLC_PS_ROOT_URI"
ROOT_PORT = "DMLC_PS_ROOT_PORT"
NODE_HOST = "DMLC_NODE_HOST"
LOCAL_RANK = "BYTEPS_LOCAL_RANK"
LOCAL_SIZE = "BYTEPS_LOCAL_SIZE"

_SOCKETS = "BYTEPS_SOCKET_PATH"
_ASYNCHRONOUS = "BYTEPS_ENABLE_ASYNC"
_HOW = (
    "`keras-towers run -np 2 --strategy byteps script.py` sets all of them; to "
    "start processes by hand see the page on BytePS in the documentation."
)


def worker(environment: Mapping[str, str] = os.environ) -> str | None:
    """Check a worker's place and describe it; None if no variable names one."""
    if not any(name.startswith("DMLC_") for name in environment):
        return None
    workers, servers, root, port = _job(environment, ["worker"], WORKER_ID)
    number = _number(environment, WORKER_ID, 0, workers)
    local_size = _number(environment, LOCAL_SIZE, 1, default="1")
    _number(environment, LOCAL_RANK, 0, local_size, default="0")
    if environment.get(_ASYNCHRONOUS, "0") != "0":
        raise _wrong(
            f"{_ASYNCHRONOUS} makes servers forget the step that a gradient is "
            "of, which no strategy here can use: unset it on all processes"
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
                # As where it was in use a moment ago.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((root, port))
        except OSError as error:
            raise _wrong(
                f"{ROOT_URI}={root} and {ROOT_PORT}={port} have to be an "
                "address of the scheduler's machine, which this is, and a "
                f"free port ({error.strerror})"
            ) from None


def prepare(place: str | None) -> None:
    """Set the other variables that BytePS reads, unless the user has."""
    if place is None:
        # Alone: BytePS wants to be told even that.
        os.environ.update({ROLE: "worker", NUM_WORKER: "1", WORKER_ID: "0"})
        os.environ.setdefault(NUM_SERVER, "0")
    else:
        # Also one worker goes by the servers, as several do.
        os.environ.setdefault("BYTEPS_FORCE_DISTRIBUTED", "1")
    os.environ.setdefault(LOCAL_RANK, "0")
    os.environ.setdefault(LOCAL_SIZE, "1")
    # Its other ways to choose a tensor's server read memory that is freed.
    os.environ.setdefault("BYTEPS_KEY_HASH_FN", "naive")
    if os.environ[LOCAL_SIZE] == "1" and _SOCKETS not in os.environ:
        # Those between the processes of a machine, of which it is alone.
        path = tempfile.mkdtemp(prefix="keras-towers-byteps-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        os.environ[_SOCKETS] = path


def _job(
    environment: Mapping[str, str], roles: Sequence[str], *others: str
) -> tuple[int, int, str, int]:
    """The workers, the servers, and the scheduler's host and port."""
    role = environment.get(ROLE)
    if role not in roles:
        raise _wrong(
            f"{ROLE} is {role!r}, but that of this process has to be "
            f"{' or '.join(map(repr, roles))}"
        )
    needed = *others, NUM_WORKER, NUM_SERVER, ROOT_URI, ROOT_PORT
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise _wrong(f"not set: {', '.join(missing)}")
    workers = _number(environment, NUM_WORKER, 1)
    servers = _number(environment, NUM_SERVER, 1)
    port = _number(environment, ROOT_PORT, 1)
    root = environment[ROOT_URI]
    _check_addresses(root, environment.get(NODE_HOST))
    return workers, servers, root, port


def _check_addresses(host: str, own: str | None) -> None:
    """Check that this machine and the scheduler's can be reached."""
    try:
        root = socket.gethostbyname(host)
    except OSError as error:
        raise _wrong(
            f"{ROOT_URI}={host} is no host that this machine knows ({error})"
        ) from None
    if own is None:
        return
    if not is_local_address(own):
        raise _wrong(f"{NODE_HOST}={own} has to be an address of this machine")
    address = socket.gethostbyname(own)
    if address.startswith("127.") != root.startswith("127."):
        raise _wrong(
            f"{NODE_HOST}={own} and {ROOT_URI}={host}: either both are "
            "addresses of loopback, or none is"
        )


def _number(
    environment: Mapping[str, str],
    name: str,
    least: int,
    end: int = 1 << 16,
    *,
    default: str = "",
) -> int:
    """A whole number in a range."""
    text = environment.get(name, default)
    if not text.isdecimal() or not least <= int(text) < end:
        raise _wrong(
            f"{name}={text!r} has to be a whole number from {least} to "
            f"{end - 1}"
        )
    return int(text)


def _wrong(what: str) -> TowerError:
    return TowerError(f"BytePS cannot start: {what}. {_HOW}")
