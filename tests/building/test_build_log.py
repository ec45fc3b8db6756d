"""What is read from a build's log."""

import pytest

from keras_towers.building.build import errors_in

COMPILER = """
  [ 71%] Building CXX object horovod/tensorflow/xla_mpi_ops.cc.o
  cd /tmp/x && /usr/bin/c++ -Wall -Werror=return-type -o xla_mpi_ops.cc.o
  /x/xla_mpi_ops.cc:18:10: fatal error: xla/gone.h: No such file or directory
     18 | #include "xla/gone.h"
  compilation terminated.
  /tmp/x/mpi_ops.cc:20:3: warning: unused variable 'error'
  /tmp/x/mpi_ops.cc:21:3: error: 'x' was not declared in this scope
  /tmp/x/mpi_ops.cc:21:3: error: 'x' was not declared in this scope
  make[2]: *** [CMakeFiles/x.dir/build.make:76: xla_mpi_ops.cc.o] Error 1
  error: command '/usr/bin/cmake' failed with exit code 2
  error: subprocess-exited-with-error
ERROR: Failed building wheel for horovod
"""
CMAKE = """
  CMake Error at /usr/share/FindPackageHandle.cmake:230 (message):
    Could NOT find MPI (missing: MPI_CXX_FOUND)
"""


GONE = "18:10: fatal error: xla/gone.h: No such file or directory"
SCOPE = "/tmp/x/mpi_ops.cc:21:3: error: 'x' was not declared in this scope"
NO_MPI = "(message): Could NOT find MPI (missing: MPI_CXX_FOUND)"
MANY = [f"a.cc:{line}: error: b" for line in range(12)]


@pytest.mark.parametrize(
    ("log", "ends"),
    [
        # The compiler's own errors, each once.
        (COMPILER, [GONE, SCOPE]),
        (CMAKE, [NO_MPI]),
        # No more than ten.
        ("\n".join(MANY), MANY[:10]),
        # Without a known error the end.
        ("one\n\ntwo", ["one", "two"]),
    ],
)
def test_the_first_errors(log, ends):
    errors = errors_in(log.splitlines())
    for error, end in zip(errors, ends, strict=True):
        assert error.endswith(end)
