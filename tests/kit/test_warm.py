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
