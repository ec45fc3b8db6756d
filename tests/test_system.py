"""How a process ends that has lost another one of its job."""

import subprocess
import sys

import pytest

# What waits for the lost one, where Python runs no other thread any more.
HANGS = """
import atexit, ctypes, sys
from keras_towers import settings, system
settings.TEARDOWN_S = 0.5
class Waits:
    def __del__(self, sleep=ctypes.PyDLL(None).sleep, s=int(sys.argv[1])):
        sleep(s)
kept = Waits()
system.end_in_time()
system.end_in_time()
print("ended", flush=True)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("waits_s", "code"), [(100, 1), (0, 75)])
def test_the_end_of_a_script_is_that_of_its_process(waits_s, code):
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(waits_s), "75"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "ended\n", "")
