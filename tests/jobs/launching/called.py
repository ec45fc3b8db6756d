"""What ``kt.launch`` calls in its tests, without TensorFlow."""

import contextlib
import os
import signal
import sys
import threading
import time

import keras_towers as kt


def fail():
    with contextlib.suppress(kt.TowerError):
        kt.launch(print)
        raise AssertionError("a rank started ranks")
    if os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("bad data")
    time.sleep(600)


def wait(folder):
    (folder / os.environ["HOROVOD_RANK"]).touch()
    time.sleep(600)


ENDS = {
    "unpicklable": threading.Lock,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "early": lambda: os._exit(0),
    "exit": lambda: sys.exit("enough"),
}


def end(how):
    return ENDS[how]()
