"""Builds of wheels, with a pip that only pretends.

The real build is what `make test` begins with.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keras_towers.engines.byteps.byteps_recipe import BytePS
from keras_towers.engines.horovod.horovod_recipe import Horovod
from keras_towers.foundation import commands
from keras_towers.jobs.building import recipe, toolchain
from keras_towers.jobs.building.build import (
    build_environment,
    build_wheel,
    cache_folder,
    errors_in,
    install_wheel,
)
from keras_towers.jobs.building.recipe import InstalledEngine, InstallError
from tests.kit.processes import wait_until

WHEEL = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERAS_TOWERS_CACHE", str(folder))
    monkeypatch.setattr(toolchain, "problems", lambda tools: [])
    return folder


@pytest.fixture
def pip(monkeypatch):
    """A pip that writes a wheel, or ends as it is told to."""

    class Pip:
        said = "  Building CXX object a.o\n"
        status = 0
        until = staticmethod(lambda: True)

        def __init__(self):
            self.calls = []

        def __call__(self, command, timeout_s, environment, log):
            self.calls.append(command[3:])
            log.write_text(self.said)
            if command[3] != "wheel":
                return commands.CommandResult(0, self.said, "")
            assert wait_until(self.until)
            if not self.status:
                folder = Path(command[-1].removeprefix("--wheel-dir="))
                folder.mkdir()
                (folder / WHEEL).write_text("a wheel")
            return commands.CommandResult(self.status, self.said, "")

        def builds(self):
            return sum(call[0] == "wheel" for call in self.calls)

    fake = Pip()
    monkeypatch.setattr(commands, "run_command", fake)
    return fake


def test_the_second_time_it_comes_from_the_cache(pip, cache):
    wheel, cached = build_wheel(Horovod(), print)
    assert not cached and wheel.read_text() == "a wheel"
    assert wheel.is_relative_to(cache)
    assert build_wheel(Horovod(), print) == (wheel, True)
    assert pip.builds() == 1
    assert build_wheel(Horovod(), print, rebuild=True) == (wheel, False)
    assert pip.builds() == 2
    assert not list((cache / "logs").iterdir())


def test_two_at_a_time_build_once(pip):
    told = []
    # As long as the other one does not wait, it builds.
    pip.until = lambda: "waiting for another build of the same wheel" in told
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(build_wheel, Horovod(), told.append) for _ in range(2)
        ]
    assert sorted(one.result()[1] for one in both) == [False, True]
    assert pip.builds() == 1


def test_what_does_not_compile(pip, cache):
    pip.status = 1
    pip.said = "/x/a.cc:1:10: fatal error: mpi.h: No such file or directory\n"
    with pytest.raises(InstallError) as error:
        build_wheel(Horovod(), print)
    message = str(error.value)
    assert "fatal error: mpi.h" in message
    (log,) = (cache / "logs").iterdir()
    assert str(log) in message and log.read_text() == pip.said
    assert not list(cache.rglob("*.whl"))


def test_an_interrupt_leaves_nothing(pip, cache):
    def interrupt():
        raise KeyboardInterrupt

    pip.until = interrupt
    with pytest.raises(KeyboardInterrupt):
        build_wheel(Horovod(), print)
    assert not list((cache / "logs").iterdir())
    assert not list(cache.rglob("*.whl"))


def test_what_is_missing_is_said_before_anything_is_done(pip, monkeypatch):
    monkeypatch.setattr(toolchain, "problems", lambda tools: ["no make"])
    with pytest.raises(InstallError, match="no make"):
        build_wheel(Horovod(), print)
    assert not pip.calls


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        (Horovod, {"with_mpi": True}),
        (Horovod, {"with_nccl": True}),
        (BytePS, {"with_nccl": True}),
        (Horovod, {"CXXFLAGS": "-O0"}),
        (Horovod, {"HOROVOD_CPU_OPERATIONS": "MPI"}),
        (BytePS, {"CXX": "another"}),
    ],
    ids=str,
)
def test_another_wheel_for_every(recipe, change, monkeypatch):
    before = cache_folder(recipe())
    assert cache_folder(recipe()) == before
    ((name, value),) = change.items()
    if name.isupper():
        monkeypatch.setenv(name, value)
        change = {}
    assert cache_folder(recipe(**change)) != before


def test_another_wheel_for_every_version_and_processor(monkeypatch):
    before = cache_folder(BytePS()), cache_folder(Horovod())
    monkeypatch.setattr(recipe, "cpu_type", lambda: "another")
    monkeypatch.setattr(Horovod, "version", "0.28.2")
    assert cache_folder(BytePS()) != before[0]
    assert cache_folder(Horovod()) != before[1]


def test_the_environment_of_a_build(tmp_path, monkeypatch):
    for name, value in (
        *(("HOROVOD_WITHOUT_GLOO", "1"), ("HOROVOD_GPU_OPERATIONS", "NCCL")),
        ("CPLUS_INCLUDE_PATH", "/mine"),
        # As under `make -j8 test`.
        *(("MAKELEVEL", "1"), ("MAKEFLAGS", " -j8 --jobserver-auth=3,4")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(toolchain, "jobs", lambda: 3)
    variables = build_environment(Horovod(with_mpi=True), tmp_path)
    assert "HOROVOD_WITHOUT_GLOO" not in variables
    assert "HOROVOD_GPU_OPERATIONS" not in variables
    assert variables["HOROVOD_WITH_MPI"] == "1"
    assert variables["MAKEFLAGS"] == "-j3"
    *folders, last = variables["CPLUS_INCLUDE_PATH"].split(os.pathsep)
    assert last == "/mine"
    assert all(Path(folder).is_dir() for folder in folders)
    moved = "tensorflow/compiler/xla/client/xla_builder.h"
    (header,) = (
        path
        for path in (Path(folder, moved) for folder in folders)
        if path.is_file()
    )
    assert '#include "xla/hlo/builder/xla_builder.h"\n' in header.read_text()


BAD = InstalledEngine("0.28.1", "2.21.0", False, "undefined symbol")
GOOD = InstalledEngine("0.28.1", "2.21.0", True, parts={"Gloo": True})


def test_a_cached_wheel_that_does_not_load_is_built_anew(pip, monkeypatch):
    found = [BAD, GOOD]
    monkeypatch.setattr(Horovod, "find_installed", lambda recipe: found.pop(0))
    build_wheel(Horovod(), print)
    recipe = Horovod()
    cached, loaded = install_wheel(recipe, *build_wheel(recipe, print), print)
    assert not cached and loaded.built_in == "Gloo"
    assert pip.builds() == 2


def test_a_fresh_wheel_that_does_not_load_is_an_error(pip, monkeypatch):
    monkeypatch.setattr(Horovod, "find_installed", lambda recipe: BAD)
    wheel, cached = build_wheel(Horovod(), print)
    with pytest.raises(InstallError, match="undefined symbol"):
        install_wheel(Horovod(), wheel, cached, print)
    assert not wheel.exists()


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
