"""Commands end with their time limit or their caller, and all they started."""

import sys
import time

import psutil
import pytest

from keras_towers.subprocesses import Ended, NoAnswer, ask_python, run

pytestmark = pytest.mark.core

# Starts a child of its own, says which, and waits for it.
PARENT = """
import subprocess, sys
code = "import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code])
print(child.pid, flush=True)
child.wait()
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def python(code):
    return [sys.executable, "-c", code]


def gone(pid, limit_s=10):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            # An orphan that nobody reaps has ended, too.
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    psutil.Process(pid).kill()
    return False


def test_both_streams_and_the_status():
    code = "import sys; print('out'); print('err', file=sys.stderr); exit(3)"
    assert run(python(code), 30) == Ended(3, "out\n", "err\n")


def test_its_environment_is_what_is_given():
    code = "import os; print(os.environ.get('HOME'), os.environ['A'])"
    assert run(python(code), 30, {"A": "1"}).stdout == "None 1\n"


def test_a_log_gets_both_streams_and_its_lines_are_told(tmp_path):
    code = (
        "import sys; print('a', flush=True); print('b', file=sys.stderr);"
        "sys.stderr.flush(); print('c', end='')"
    )
    log = tmp_path / "log"
    lines = []
    ended = run(python(code), 30, log=log, on_line=lines.append)
    assert ended == Ended(0, "a\nb\nc", "")
    assert log.read_text() == "a\nb\nc"
    assert lines == ["a\n", "b\n"]


def test_time_is_up_for_all_that_it_started():
    ended = run(python(PARENT), 2)
    assert ended.code is None
    assert gone(int(ended.stdout))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_ends_all_that_it_started(error):
    pids = []

    def fail(line):
        pids.append(int(line))
        raise error

    with pytest.raises(error):
        run(python(PARENT), 60, on_line=fail)
    assert gone(pids[0])


def test_what_it_leaves_behind_is_ended_and_not_waited_for():
    start = time.monotonic()
    ended = run(python(PARENT.replace("child.wait()", "")), 50)
    assert ended.code == 0 and time.monotonic() - start < 40
    assert gone(int(ended.stdout))


def test_what_ignores_sigterm_is_killed():
    start = time.monotonic()
    ended = run(python(STUBBORN), 2, grace_s=0.5)
    assert ended == Ended(None, "ready\n", "")
    assert time.monotonic() - start < 30


def test_the_last_json_object_is_the_answer():
    code = "print('{\"a\": 1}'); print('[2]'); print('noise'); exit(1)"
    assert ask_python(["-c", code], 30) == {"a": 1}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('no')", "exit status 0"),
        ("raise ValueError('why')", "exit status 1: ValueError: why"),
        ("import os; os.kill(os.getpid(), 4)", "exit status -4"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
    ],
)
def test_no_answer(code, said):
    with pytest.raises(NoAnswer) as error:
        ask_python(["-c", code], 1 if "sleep" in code else 30)
    assert str(error.value) == said
