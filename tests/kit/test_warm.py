"""A process that is forked is to its starter what its own would be."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.kit import warm

WAITS = """
import os, sys, time
print(os.getpid(), "tensorflow" in sys.modules, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM))
def test_it_ends_with_the_one_that_was_started(number, monkeypatch):
    monkeypatch.delenv(warm.SWITCH, raising=False)
    started = subprocess.Popen(
        [sys.executable, "-c", WAITS],
        env={**os.environ, **warm.environment()},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, imported = started.stdout.readline().split()
    assert imported == "True", warm.server.said()
    assert int(pid) != started.pid
    child = psutil.Process(int(pid))
    started.send_signal(number)
    assert started.wait(60) == -number
    started.communicate()
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone


def test_what_counts_at_import_is_not_forked(monkeypatch):
    monkeypatch.delenv(warm.SWITCH, raising=False)
    code = "import sys; print('tensorflow' in sys.modules)"
    environment = {**os.environ, **warm.environment()}
    for variables, wanted in (({}, "True"), ({"KERAS_HOME": "/"}, "False")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == wanted, warm.server.said()
