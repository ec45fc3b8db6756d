"""Starting BytePS in a process, and leaving it."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from keras_towers import settings
from keras_towers.engines.byteps import dmlc
from keras_towers.errors import TowerError
from keras_towers.rendezvous import check, environments
from keras_towers.rendezvous.environment_variables import seconds
from keras_towers.rendezvous.environments import tf_config
from keras_towers.rendezvous.liveness import waiting
from keras_towers.settings import BYTEPS_LAUNCHED, START_TIMEOUT
from keras_towers.transport import engine

logger: logging.Logger = logging.getLogger("keras_towers")

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 500_000


def load() -> ModuleType:
    """Import ``byteps.tensorflow``, or raise an error with instructions."""
    return engine.load("byteps", "BytePS")


_place: str | None = None
_connected = False


def connect(bps: ModuleType) -> None:
    """Start BytePS in this process, and wait for the others."""
    global _connected, _place
    if _connected:
        return
    _place = dmlc.worker()
    member = environments.detect()
    if _place is None and member and not member.alone:
        raise TowerError(
            f"this process is {member}, but nothing has started BytePS's "
            "scheduler and servers, so that each process would train a model "
            "of its own: use `keras-towers run -np 2 --strategy byteps "
            "script.py`, or, if the script enters the strategy itself, "
            f"`keras-towers run -np 2 --servers 1`. "
            f"{environments.HOW_TO_BE_ALONE}"
        )
    if _place is None and member is None:
        tf_config.refuse_apart("BytePS")
    check.introduce("BytePS")
    dmlc.prepare(_place)
    with _waited_for(_place), _patient_threads():
        bps.init(lazy=False)
    # Its own way to leave waits for all others, also after an error.
    atexit.unregister(bps.shutdown)
    atexit.register(_leave, bps)
    _connected = True


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Let threads that are started meanwhile sleep no shorter than needed."""
    # Each of BytePS's looks for work every microsecond. On a machine with few
    # cores that leaves little for the model. A thread inherits the slack of its
    # timers from the one that starts it.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), 0, 0, 0)


def was_launched() -> bool:
    """Whether something has described a job, maybe of one process."""
    return _place is not None or environments.detect() is not None


@contextmanager
def _waited_for(place: str | None) -> Iterator[None]:
    """End the process if the others do not come: no exception reaches C++."""
    done = threading.Event()
    limit_s = seconds(START_TIMEOUT, settings.START_TIMEOUT_S)

    def text(waited_s: float) -> str:
        return (
            f"{place} has waited {waited_s:.0f} s for the scheduler and all "
            "servers and workers. Do they run, reach that address, and have "
            f"the same {dmlc.NUM_WORKER} and {dmlc.NUM_SERVER}, and each "
            f"worker another {dmlc.WORKER_ID}?"
        )

    def watch() -> None:
        for waited_s in waiting(limit_s, settings.NETWORK_POLL_S):
            if done.is_set():
                return
            if waited_s:
                logger.warning("%s", text(waited_s))
        if not done.is_set():
            told = f"{text(limit_s)} {START_TIMEOUT} sets the seconds."
            print(f"keras_towers: {told}", file=sys.stderr, flush=True)
            os._exit(1)

    if place is not None:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _leave(bps: ModuleType) -> None:
    """Leave the job at the end of Python."""
    # BytePS's ``shutdown`` ends the servers too, once all workers have called
    # it. Where the launcher ends them there is nothing to wait for, and after
    # an error in this process there would be no end to it.
    failed = getattr(sys, "last_value", None) is not None
    if _place is not None and (BYTEPS_LAUNCHED in os.environ or failed):
        # Destructors of BytePS would find its threads running. This is called
        # after Python's end, with the exit code.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        return
    bps.shutdown()
