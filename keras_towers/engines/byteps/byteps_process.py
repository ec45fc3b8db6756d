"""This process as a worker of BytePS: how it joins its job and leaves it."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from keras_towers import settings
from keras_towers.engines.byteps import dmlc
from keras_towers.errors import TowerError
from keras_towers.rendezvous import launchers, tf_config, versions, watch
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.settings import ENV_BYTEPS_LAUNCHED, ENV_START_TIMEOUT

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 500_000

# Describes the worker that this process is; None: it is in no job.
_worker: str | None = None
_connected = False


def connect(bps: ModuleType) -> None:
    """Start BytePS in this process, and wait for the other processes."""
    global _connected, _worker
    if _connected:
        return
    _worker = dmlc.check_worker()
    member = launchers.detect()
    if _worker is None and member and not member.is_single_process:
        raise TowerError(
            f"this process is {member}, but nothing has started BytePS's "
            "scheduler and servers, so that each process would train a model "
            "of its own: use `keras-towers run -np 2 --strategy byteps "
            "script.py`, or, if the script enters the strategy itself, "
            f"`keras-towers run -np 2 --servers 1`. "
            f"{launchers.HOW_TO_TRAIN_ALONE}"
        )
    if _worker is None and member is None:
        tf_config.refuse_unread("BytePS")
    versions.compare_with_first_rank("BytePS")
    dmlc.set_defaults(_worker)
    with _limit_start(_worker), _coarse_timers():
        bps.init(lazy=False)
    # BytePS's own shutdown waits for all workers, also after an error.
    atexit.unregister(bps.shutdown)
    atexit.register(_leave_job, bps)
    _connected = True


def was_launched() -> bool:
    """Whether the environment describes a job, even of one process."""
    return _worker is not None or launchers.detect() is not None


@contextmanager
def _coarse_timers() -> Iterator[None]:
    """Give threads started inside the block a coarser timer.

    Each thread of BytePS polls for work every microsecond, which on a machine
    with few cores leaves little time for the model. A thread inherits the slack
    of its timers from the thread that starts it.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), 0, 0, 0)


@contextmanager
def _limit_start(worker: str | None) -> Iterator[None]:
    """End the process if the start takes too long.

    An exception could not interrupt BytePS's C++ code.
    """
    limit_s = seconds(ENV_START_TIMEOUT, settings.START_TIMEOUT_S)
    text = (
        f"{worker} has waited {limit_s:.0f} s for the scheduler and all "
        "servers and workers. Do they run, reach that address, and have the "
        f"same {dmlc.NUM_WORKER} and {dmlc.NUM_SERVER}, and each worker "
        f"another {dmlc.WORKER_ID}? {ENV_START_TIMEOUT} sets the seconds."
    )
    timer = threading.Timer(limit_s, watch.end_process, [text])
    timer.daemon = True
    if worker is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave_job(bps: ModuleType) -> None:
    """Leave the job at the end of Python.

    BytePS's ``shutdown`` also ends the servers, once all workers have called
    it. If our launcher ends the servers, there is nothing to wait for; and
    after an error in this process, the wait might never end.
    """
    failed = getattr(sys, "last_value", None) is not None
    if _worker is not None and (ENV_BYTEPS_LAUNCHED in os.environ or failed):
        # BytePS's destructors would crash while its threads run. So end the
        # process, with its exit code, before they are called.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        return
    bps.shutdown()
