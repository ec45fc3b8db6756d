"""A process that is forked is to its starter what its own would be."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.kit import warm

SAYS = "import os, sys; print(os.getpid(), 'tensorflow' in sys.modules)"
WAITS = f"{SAYS}; sys.stdout.flush(); import time; time.sleep(600)"


def start(monkeypatch, code, **variables):
    monkeypatch.delenv(warm.SWITCH, raising=False)
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **warm.environment(), **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, imported = started.stdout.readline().split()
    return started, int(pid), imported == "True"


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM))
def test_it_ends_with_the_one_that_was_started(number, monkeypatch):
    started, pid, imported = start(monkeypatch, WAITS)
    assert imported, warm.servers[-1].said()
    assert pid != started.pid
    child = psutil.Process(pid)
    started.send_signal(number)
    assert started.wait(60) == -number
    started.communicate()
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone


def test_what_counts_at_import_is_not_forked(monkeypatch):
    started, _, imported = start(monkeypatch, SAYS, KERAS_HOME="/")
    assert not imported
    assert started.wait(60) == 0
