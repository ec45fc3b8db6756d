"""What is read from a build's log."""

import pytest

from keras_towers.building.build_log import errors_in, hint_for, progress_in
from keras_towers.building.horovod import Horovod

COMPILER = """\
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


def test_the_compilers_own_errors_each_once():
    assert errors_in(COMPILER.splitlines()) == [
        "/x/xla_mpi_ops.cc:18:10: fatal error: xla/gone.h: No such file or "
        "directory",
        "/tmp/x/mpi_ops.cc:21:3: error: 'x' was not declared in this scope",
    ]


def test_cmake_says_what_on_the_line_below():
    log = [
        "  CMake Error at /usr/share/FindPackageHandle.cmake:230 (message):",
        "    Could NOT find MPI (missing: MPI_CXX_FOUND)",
    ]
    (error,) = errors_in(log)
    assert error.endswith(
        "(message): Could NOT find MPI (missing: MPI_CXX_FOUND)"
    )
    assert "libopenmpi-dev" in hint_for([error])


def test_cmake_spreads_a_message_over_lines():
    log = [
        "CMake Error at CMakeTestCXXCompiler.cmake:63 (message):",
        "  The C++ compiler",
        "",
        '    "/usr/bin/c++"',
        "",
        "  is not able to compile a simple test program.",
        "",
        "  It fails with the following output:",
    ]
    (error,) = errors_in(log)
    assert error.endswith("is not able to compile a simple test program.")
    assert "check CXX" in hint_for([error])


def test_no_more_than_the_limit():
    log = [f"a.cc:{line}: error: bad" for line in range(50)]
    assert errors_in(log, limit=10) == log[:10]


def test_a_log_without_a_known_error_gives_its_end():
    assert errors_in(["one", "", "two", "three"], limit=2) == ["two", "three"]


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("a.cc:1:10: fatal error: mpi.h: No such file", "libopenmpi-dev"),
        ("a.cc:1:10: fatal error: nccl.h: No such file", "libnccl-dev"),
        ("#error -- unsupported GNU version! CMAKE_CUDA_COMPILER", "in CXX"),
        ("c++: fatal error: Killed signal terminated program", "MAKEFLAGS=-j1"),
        ("a.cc:1: fatal error: xla/b.h: No such file", "TensorFlow 2.20"),
        ("fatal error: error writing to x: No space left on device", "TMPDIR"),
        ("ERROR: No matching distribution found for cmake", "network"),
    ],
)
def test_what_to_do(line, advice):
    assert advice in hint_for(errors_in([line]), Horovod.hints)


def test_an_error_that_nobody_knows():
    assert hint_for(["a.cc:1:1: error: expected ';'"]) is None


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("  [ 42%] Building CXX object gloo/CMakeFiles/x.dir/y.cc.o", 0.42),
        ("[100%] Built target tensorflow", 1.0),
        ("[3/12] Building CXX object", 0.25),
        ("Compiling [ 42%]", None),
        ("[0/0] nothing", None),
    ],
)
def test_how_far_it_is(line, share):
    assert progress_in(line) == share
