"""Commands: how they end, with all that they started, and their answers."""

import contextlib
import sys
import threading
import time

import psutil
import pytest

from keras_towers.foundation import commands
from keras_towers.foundation.commands import (
    CommandResult,
    NoAnswer,
    ask_python,
    run_command,
)
from tests.kit.processes import wait_until

# Longer than any test may take.
LIMIT_S = 600
SLEEP = f"import time; time.sleep({LIMIT_S})"
# Starts a child of its own, says which, and waits for it.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(child.pid, flush=True)
child.wait()
"""
STUBBORN = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
{SLEEP}
"""


def run_code(code, *arguments, **options):
    return run_command([sys.executable, "-c", code], *arguments, **options)


def gone(pid, limit_s=60):
    with contextlib.suppress(psutil.NoSuchProcess):
        process, end = psutil.Process(int(pid)), time.monotonic() + limit_s
        # An orphan that nobody reaps has ended, too.
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                process.kill()
                return False
            time.sleep(0.05)
    return True


def test_run_returns_streams_and_status():
    code = (
        "import os, sys; print(os.environ.get('HOME'), os.environ['A']);"
        "print('err', file=sys.stderr); exit(3)"
    )
    ended = run_code(code, 60, {"A": "1"})
    assert ended == CommandResult(3, "None 1\n", "err\n")


def test_a_log_gets_both_streams(tmp_path):
    code = (
        "import sys; print('a', flush=True); print('b', file=sys.stderr);"
        "sys.stderr.flush(); print('c', end='')"
    )
    log = tmp_path / "log"
    assert run_code(code, 60, log=log) == CommandResult(0, "a\nb\nc", "")
    assert log.read_text() == "a\nb\nc"


@pytest.fixture
def run_to_a_line(monkeypatch, tmp_path):
    """Run a command until it has written a line, when an error is raised."""

    def run_to_a_line(code, error, **options):
        log = tmp_path / "log"

        def wait_for_line(process, limit_s, stop):
            wait_until(lambda: "\n" in log.read_text())
            if error is not TIME_IS_UP:
                raise error

        monkeypatch.setattr(commands, "_wait", wait_for_line)
        try:
            return run_code(code, LIMIT_S, log=log, **options)
        except KeyboardInterrupt:
            return CommandResult(2, log.read_text(), "")

    return run_to_a_line


TIME_IS_UP = object()


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 2), (TIME_IS_UP, None)]
)
def test_all_that_it_started_ends_with_it(run_to_a_line, error, code):
    ended = run_to_a_line(PARENT, error)
    assert ended.code == code
    assert gone(ended.stdout)


def test_another_thread_ends_it(tmp_path):
    log, stop = tmp_path / "log", threading.Event()

    def end():
        wait_until(lambda: log.exists() and "\n" in log.read_text())
        stop.set()

    threading.Thread(target=end).start()
    ended = run_code(PARENT, LIMIT_S, log=log, stop=stop)
    assert ended.code is None
    assert gone(ended.stdout)


def test_what_is_left_behind_and_not_waited_for_ends_with_it():
    ended = run_code(PARENT.replace("child.wait()", ""), LIMIT_S)
    assert ended.code == 0
    assert gone(ended.stdout)


def test_what_ignores_sigterm_is_killed(run_to_a_line):
    ended = run_to_a_line(STUBBORN, TIME_IS_UP, grace_s=0.5)
    assert ended == CommandResult(None, "ready\n", "")


def test_the_last_json_object_is_the_answer():
    code = "print('{\"a\": 1}'); print('[2]'); print('noise'); exit(1)"
    assert ask_python(["-c", code], 60) == {"a": 1}


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("print('no')", 60, "exit code 0"),
        (
            "raise ValueError('why')",
            60,
            "has ended with exit code 1: ValueError: why",
        ),
        ("import os; os.kill(os.getpid(), 4)", 60, "exit code -4"),
        (SLEEP, 1, "has not ended after 1 s"),
    ],
)
def test_a_process_without_an_answer_says_why(code, limit_s, said):
    with pytest.raises(NoAnswer) as error:
        ask_python(["-c", code], limit_s)
    assert str(error.value).endswith(said)
