import subprocess
import sys

import pytest

from keras_towers import system

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
runpy.run_path(sys.argv[1])["keep_freed"]()
bytearray(20_000_000)
print(faults() < given_back / 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again():
    command = [sys.executable, "-c", FAULTS, system.__file__]
    assert subprocess.check_output(command, timeout=60) == b"True\n"
