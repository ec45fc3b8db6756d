"""The variables by which BytePS's processes find one another.

BytePS's network layer comes from DMLC. Where a variable is missing or wrong it
waits for ever or aborts without a traceback, so they are checked before.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_towers.errors import TowerError
from keras_towers.meeting.addresses import is_own

ROLE = "DMLC_ROLE"
WORKER_ID = "DMLC_WORKER_ID"
NUM_WORKER = "DMLC_NUM_WORKER"
NUM_SERVER = "DMLC_NUM_SERVER"
ROOT_URI = "DMLC_PS_ROOT_URI"
ROOT_PORT = "DMLC_PS_ROOT_PORT"
NODE_HOST = "DMLC_NODE_HOST"
LOCAL_RANK = "BYTEPS_LOCAL_RANK"
LOCAL_SIZE = "BYTEPS_LOCAL_SIZE"

_REQUIRED = (NUM_WORKER, NUM_SERVER, ROOT_URI, ROOT_PORT)
_SERVING = ("scheduler", "server")
_PORTS = 65536
_SOCKETS = "BYTEPS_SOCKET_PATH"
_ASYNCHRONOUS = "BYTEPS_ENABLE_ASYNC"
_SIGN = "DMLC_"
_HOW = (
    "`keras-towers run -np 2 --strategy byteps script.py` sets all of them; to "
    "start processes by hand see the page on BytePS in the documentation."
)


@dataclass(frozen=True)
class Worker:
    """A worker's place in a job of BytePS.

    Attributes:
        worker: which of BytePS's machines this is, from 0.
        root: the scheduler's host.
        port: the scheduler's port.
    """

    worker: int
    workers: int
    servers: int
    root: str
    port: int
    local_rank: int = 0
    local_size: int = 1

    @property
    def size(self) -> int:
        """The number of processes that train."""
        return self.workers * self.local_size

    def __str__(self) -> str:
        return (
            f"worker {self.worker} of {self.workers}, with {self.servers} "
            f"server(s) and the scheduler at {self.root}:{self.port}"
        )


def worker(environment: Mapping[str, str] = os.environ) -> Worker | None:
    """This process's place, None if no variable says that it has one."""
    if not any(name.startswith(_SIGN) for name in environment):
        return None
    role = environment.get(ROLE)
    if role != "worker":
        raise _wrong(
            f"{ROLE} is {role!r}, but a process that trains has to be 'worker'"
        )
    needed = WORKER_ID, *_REQUIRED
    workers, servers, root, port = _job(environment, needed)
    place = Worker(
        _number(environment, WORKER_ID, 0),
        workers,
        servers,
        root,
        port,
        _number(environment, LOCAL_RANK, 0, default=0),
        _number(environment, LOCAL_SIZE, 1, default=1),
    )
    _check_less(WORKER_ID, place.worker, NUM_WORKER, workers)
    _check_less(LOCAL_RANK, place.local_rank, LOCAL_SIZE, place.local_size)
    if environment.get(_ASYNCHRONOUS, "0") != "0":
        raise _wrong(
            f"{_ASYNCHRONOUS} makes servers forget the step that a gradient is "
            "of, which no strategy here can do with: unset it on all processes"
        )
    return place


def check_server(environment: Mapping[str, str] = os.environ) -> None:
    """Check what the scheduler or a server is told."""
    role = environment.get(ROLE)
    if role not in _SERVING:
        raise _wrong(
            f"{ROLE} is {role!r}, but a process that serves has to be "
            f"{' or '.join(map(repr, _SERVING))}"
        )
    _, _, root, port = _job(environment, _REQUIRED)
    if role == "scheduler":
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


def prepare(place: Worker | None) -> None:
    """Set what BytePS reads besides, where the user has not."""
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
    environment: Mapping[str, str], needed: Sequence[str]
) -> tuple[int, int, str, int]:
    """The workers, the servers, and the scheduler's host and port."""
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise _wrong(f"not set: {', '.join(missing)}")
    workers = _number(environment, NUM_WORKER, 1)
    servers = _number(environment, NUM_SERVER, 1)
    port = _number(environment, ROOT_PORT, 1)
    if port >= _PORTS:
        raise _wrong(f"{ROOT_PORT}={port} has to be less than {_PORTS}")
    root = environment[ROOT_URI]
    _check_addresses(root, environment.get(NODE_HOST))
    return workers, servers, root, port


def _check_less(name: str, value: int, of: str, end: int) -> None:
    if value >= end:
        raise _wrong(f"{name}={value} has to be less than {of}={end}")


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
    try:
        address = socket.gethostbyname(own)
    except OSError:
        address = ""
    if not address or not is_own(address):
        raise _wrong(f"{NODE_HOST}={own} has to be an address of this machine")
    if _is_loopback(address) != _is_loopback(root):
        raise _wrong(
            f"{NODE_HOST}={own} and {ROOT_URI}={host}: either both are "
            "addresses of loopback, or none is"
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _number(
    environment: Mapping[str, str],
    name: str,
    least: int,
    default: int | None = None,
) -> int:
    told = environment.get(name, "" if default is None else str(default))
    if not told.isdecimal() or int(told) < least:
        raise _wrong(
            f"{name}={told!r} has to be a whole number, at least {least}"
        )
    return int(told)


def _wrong(what: str) -> TowerError:
    return TowerError(f"BytePS cannot start: {what}. {_HOW}")
