"""Starts BytePS in this process, and leaves its job when Python ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

from keras_towers.engines.byteps import dmlc
from keras_towers.foundation import settings
from keras_towers.foundation.settings import (
    ENV_BYTEPS_LAUNCHED,
    ENV_START_TIMEOUT,
)
from keras_towers.jobs.rendezvous import rank_checks, separate_training, watch
from keras_towers.jobs.rendezvous.rank_environment import seconds

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 500_000

worker: str | None = None
"""Describes the worker that this process is; None: it is in no job."""
_connected = False


def connect(bps: ModuleType) -> None:
    """Start BytePS in this process, and wait for the other processes."""
    global _connected, worker
    separate_training.refuse_child()
    if _connected:
        return
    worker = dmlc.check_worker()
    if worker is None:
        separate_training.refuse(
            "BytePS",
            "nothing has started BytePS's scheduler and servers",
            "Use `keras-towers run -np 2 --strategy byteps script.py`, or, if "
            "the script enters the strategy itself, `keras-towers run -np 2 "
            "--servers 1`.",
        )
    rank_checks.compare_with_first_rank("BytePS")
    dmlc.set_defaults(worker)
    with _limit_start(), _coarse_timers():
        bps.init(lazy=False)
    # BytePS's own shutdown waits for all workers, also after an error.
    atexit.unregister(bps.shutdown)
    atexit.register(_leave_job, bps)
    _connected = True


@contextlib.contextmanager
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


@contextlib.contextmanager
def _limit_start() -> Iterator[None]:
    """End the process if the start takes too long.

    An exception could not interrupt BytePS's C++ code.
    """
    limit_s = seconds(ENV_START_TIMEOUT, settings.START_TIMEOUT_S)
    text = (
        f"{worker} has waited {limit_s:.0f} s for the scheduler and all "
        "servers and workers. Check that they run and reach this address, "
        f"that all have the same {dmlc.NUM_WORKER} and {dmlc.NUM_SERVER}, and "
        f"that each worker has a different {dmlc.WORKER_ID}. To wait longer, "
        f"set {ENV_START_TIMEOUT}."
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
    if worker is not None and (ENV_BYTEPS_LAUNCHED in os.environ or failed):
        # BytePS's destructors would crash while its threads run. So end the
        # process, with its exit code, before they are called.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        return
    bps.shutdown()
