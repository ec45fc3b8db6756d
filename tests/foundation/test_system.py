"""The end of a process that has lost another, its memory, and its folder."""

import sys

import pytest
from typer.testing import CliRunner

import keras_towers as kt
from keras_towers.cli.main import app
from keras_towers.foundation import system
from tests.kit.scripts import run_python
from tests.kit.training import linear

# What waits for the lost one, where Python runs no other thread any more.
HANGS = """
import atexit, ctypes, sys
from keras_towers.foundation import settings, system
settings.TEARDOWN_S = float(sys.argv[3])
class Waits:
    def __del__(self, sleep=ctypes.PyDLL(None).sleep, s=int(sys.argv[1])):
        sleep(s)
kept = Waits()
system.limit_teardown()
system.limit_teardown()
print("ended", flush=True)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("waits_s", "limit_s", "code"), [(100, 0.5, 1), (0, 60, 75)]
)
def test_the_end_of_a_script_is_that_of_its_process(waits_s, limit_s, code):
    given = str(waits_s), "75", str(limit_s)
    done = run_python("-c", HANGS, *given, limit_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "ended\n", "")


# In a process of its own, since it changes how a process allocates.
FAULTS = """
import resource, runpy, sys

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        b"x" * 20_000_000
        b"y" * 28_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
runpy.run_path(sys.argv[1])["keep_freed_memory"]()
bytearray(20_000_000)
print(faults() < given_back / 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again():
    done = run_python("-c", FAULTS, system.__file__, limit_s=60)
    assert done.stdout == "True\n"


HELD = """
import os, runpy, sys, threading

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def act(name):
    if name in sys.argv:
        runpy.run_path(sys.argv[1])[name]()

def use():
    blocks = [b"x" * 100_000 for _ in range(500)]
    kept.append(blocks.pop())
    del blocks
    has_used.release()
    over.wait()

# There are as many heaps as cores.
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
act("share_freed_memory")
kept, has_used, over = [], threading.Semaphore(0), threading.Event()
before = held()
for _ in range(6):
    threading.Thread(target=use).start()
    has_used.acquire()
act("return_freed_memory")
print(held() - before < 100_000_000)
over.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(
    ("name", "is_small"),
    [
        ("share_freed_memory", True),
        ("return_freed_memory", True),
        ("", False),
    ],
)
def test_what_threads_have_freed_is_shared_or_returned(name, is_small):
    done = run_python("-c", HELD, system.__file__, name, limit_s=60)
    assert done.stdout == f"{is_small}\n"


@pytest.fixture
def in_deleted_folder(tmp_path, monkeypatch):
    """The working directory is one that somebody has deleted."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


def test_a_working_directory_that_was_deleted_is_named(
    in_deleted_folder, tmp_path
):
    """Unless nothing is relative to it."""
    words = "working directory .* has been deleted: change to one that exists"
    with pytest.raises(kt.TowerError, match=words):
        kt.Backup("backup")
    kt.Backup(tmp_path / "backup")
    kt.elastic.State(linear())
    (tmp_path / "script.py").touch()
    run = CliRunner().invoke(app, ["run", "-np", "1", f"{tmp_path}/script.py"])
    assert run.exit_code == 2 and run.output.count("\n") == 1
    assert "has been deleted" in run.output
