import subprocess
import sys

import pytest

from keras_towers.parameter_servers import memory

# It must not change how this process allocates.
FAULTS = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("memory", sys.argv[1])
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
if sys.argv[2] == "keep":
    memory.keep_freed()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

bytearray(20_000_000)
before = faults()
for _ in range(10):
    b"x" * 20_000_000
    b"y" * 28_000_000
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again():
    def pages(how):
        command = [sys.executable, "-c", FAULTS, memory.__file__, how]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        )
        return int(done.stdout)

    assert pages("keep") < pages("give back") / 2
