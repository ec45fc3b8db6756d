"""A process that is forked is to its starter what its own would be."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.kit import warm

WAITS = """
import os, sys, time
print(os.getpid(), "tensorflow" in sys.modules, flush=True)
time.sleep(600)
"""


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **warm.environment(), "OF_THIS_TEST": "there"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def forks(monkeypatch):
    monkeypatch.delenv(warm.SWITCH, raising=False)


def test_it_runs_what_python_would_run(tmp_path, forks):
    code = (
        "import os, sys, tensorflow, time\n"
        "while time.process_time() < 0.1: pass\n"
        "print(__name__, os.environ['OF_THIS_TEST'], os.getcwd(), *sys.argv)\n"
        "print(input(), file=sys.stderr)\n"
        "print(sys.path[0])\n"
        "raise SystemExit(7) if sys.argv[1] == 'ends' else ValueError('said')"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    before = warm.cpu_seconds()
    for command in (["-c", code], [str(script)], ["-m", "script"]):
        first = "" if command[0] == "-c" else str(tmp_path)
        said = command[0] if command[0] == "-c" else str(script)
        done = start("-u", *command, "ends", cwd=tmp_path)
        out, err = done.communicate("read\n", timeout=120)
        wanted = f"__main__ there {tmp_path} {said} ends\n{first}\n"
        assert (out, err, done.returncode) == (wanted, "read\n", 7)
    done = start(str(script), "fails", cwd=tmp_path)
    _, err = done.communicate("read\n", timeout=60)
    assert done.returncode == 1
    assert err.endswith("ValueError: said\n")
    assert warm.__file__ not in err
    assert warm.cpu_seconds() > before


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM))
def test_it_ends_with_the_one_that_was_started(number, forks):
    started = start("-c", WAITS)
    pid, imported = started.stdout.readline().split()
    assert imported == "True", warm.servers[-1].said()
    assert int(pid) != started.pid
    child = psutil.Process(int(pid))
    started.send_signal(number)
    assert started.wait(60) == -number
    started.communicate()
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone


def test_what_counts_at_import_is_not_forked(forks):
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
        assert done.stdout.strip() == wanted, warm.servers[-1].said()


def test_one_that_has_ended_is_replaced(monkeypatch, forks):
    monkeypatch.setattr(warm, "servers", [warm.Server()])
    ended = warm.servers[0]
    ended.kill()
    with pytest.warns(UserWarning, match="has ended"):
        while warm.environment() == {warm.VARIABLE: ended.path}:
            time.sleep(0.01)
    assert len(warm.servers) == 2
    warm.servers[1].kill()
