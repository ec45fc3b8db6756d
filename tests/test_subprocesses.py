"""Commands end with their time limit or their caller, and all they started."""

import contextlib
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from keras_towers import subprocesses
from keras_towers.subprocesses import Ended, NoAnswer, ask_python, run

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


def run_python(code, *arguments, **options):
    return run([sys.executable, "-c", code], *arguments, **options)


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
    ended = run_python(code, 60, {"A": "1"})
    assert ended == Ended(3, "None 1\n", "err\n")


def test_a_log_gets_both_streams_and_its_lines_are_told(tmp_path):
    code = (
        "import sys; print('a', flush=True); print('b', file=sys.stderr);"
        "sys.stderr.flush(); print('c', end='')"
    )
    log, lines = tmp_path / "log", []
    ended = run_python(code, 60, log=log, on_line=lines.append)
    assert ended == Ended(0, "a\nb\nc", "")
    assert log.read_text() == "a\nb\nc"
    assert lines == ["a\n", "b\n"]


def test_an_error_ends_all_that_it_started():
    pids = []

    def fail(line):
        pids.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_python(PARENT, LIMIT_S, on_line=fail)
    assert gone(*pids)


@pytest.fixture
def time_is_up(monkeypatch):
    """For ``on_line``: all of the time has passed when there is a line."""
    passed_s = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: passed_s[0] + time.monotonic(), sleep=time.sleep
    )
    monkeypatch.setattr(subprocesses, "time", clock)
    return lambda line: passed_s.append(passed_s.pop() + LIMIT_S)


def test_all_that_it_started_ends_when_its_time_is_up(time_is_up):
    ended = run_python(PARENT, LIMIT_S, on_line=time_is_up)
    assert ended.code is None
    assert gone(ended.stdout)


def test_what_is_left_behind_and_not_waited_for_ends_with_it():
    ended = run_python(PARENT.replace("child.wait()", ""), LIMIT_S)
    assert ended.code == 0
    assert gone(ended.stdout)


def test_what_ignores_sigterm_is_killed(time_is_up):
    ended = run_python(STUBBORN, LIMIT_S, grace_s=0.5, on_line=time_is_up)
    assert ended == Ended(None, "ready\n", "")


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
        (
            "import os; os.kill(os.getpid(), 4)",
            60,
            "exit code -4",
        ),
        (SLEEP, 1, "has not ended after 1 s"),
    ],
)
def test_a_process_without_an_answer_says_why(code, limit_s, said):
    with pytest.raises(NoAnswer) as error:
        ask_python(["-c", code], limit_s)
    assert str(error.value).endswith(said)
