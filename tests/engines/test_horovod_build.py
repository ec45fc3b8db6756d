"""Building and keeping Horovod's wheel, with a pip that only pretends.

The real build is what `make test` begins with.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from keras_towers.engines import (
    horovod_build,
    horovod_probe,
    horovod_recipe,
    subprocesses,
    wheel_cache,
)
from keras_towers.engines.toolchain import InstallError

WHEEL = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERAS_TOWERS_CACHE", str(folder))
    monkeypatch.setattr(horovod_build.toolchain, "missing", lambda *ignored: [])
    return folder


@pytest.fixture
def pip(monkeypatch):
    """A pip that writes a wheel, or ends as it is told to."""

    class Pip:
        said = "  [ 50%] Building CXX object a.o\n"
        status = 0
        takes_s = 0.0

        def __init__(self):
            self.calls = []
            self.environments = []

        def __call__(self, command, environment, log, on_line):
            self.calls.append(command[3:])
            self.environments.append(environment)
            log.write_text(self.said)
            if command[3] != "wheel":
                return 0
            for line in self.said.splitlines():
                on_line(line)
            time.sleep(self.takes_s)
            if not self.status:
                folder = Path(command[-1].removeprefix("--wheel-dir="))
                folder.mkdir()
                (folder / WHEEL).write_text("a wheel")
            return self.status

        def builds(self):
            return sum(call[0] == "wheel" for call in self.calls)

    fake = Pip()
    monkeypatch.setattr(subprocesses, "run_logged", fake)
    return fake


def build(progress=lambda what, share: None, **options):
    options = {"with_mpi": False, "with_nccl": False, **options}
    return horovod_build.build(progress=progress, **options)


def test_the_second_time_it_comes_from_the_cache(pip, cache):
    told = []
    first = build(lambda *what: told.append(what))
    assert not first.cached and first.wheel.read_text() == "a wheel"
    assert first.wheel.is_relative_to(cache)
    assert ("compiling", 0.5) in told
    second = build()
    assert second.cached and second.wheel == first.wheel
    assert pip.builds() == 1
    assert not build(rebuild=True).cached
    assert pip.builds() == 2
    assert not list((cache / "logs").iterdir())


def test_two_at_a_time_build_once(pip):
    pip.takes_s = 0.5
    built, told = [], []
    threads = [
        threading.Thread(
            target=lambda: built.append(
                build(lambda what, share: told.append(what))
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.cached for one in built) == [False, True]
    assert pip.builds() == 1
    assert "waiting for another build of the same wheel" in told


def test_what_does_not_compile(pip, cache):
    pip.status = 1
    pip.said = "/x/a.cc:1:10: fatal error: mpi.h: No such file or directory\n"
    with pytest.raises(InstallError) as error:
        build()
    message = str(error.value)
    assert "fatal error: mpi.h" in message and "libopenmpi-dev" in message
    (log,) = (cache / "logs").iterdir()
    assert str(log) in message and log.read_text() == pip.said
    assert not list(cache.rglob("*.whl"))


def test_an_interrupt_leaves_nothing(cache, monkeypatch):
    def interrupt(command, environment, log, on_line):
        log.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocesses, "run_logged", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build()
    assert not list((cache / "logs").iterdir())
    assert not list(cache.rglob("*.whl"))


def test_what_is_missing_is_said_before_anything_is_done(pip, monkeypatch):
    monkeypatch.setattr(
        horovod_build.toolchain, "missing", lambda *ignored: ["no make: get it"]
    )
    with pytest.raises(InstallError, match="no make: get it"):
        build()
    assert not pip.calls


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.28.2"},
        {"with_mpi": True},
        {"with_nccl": True},
        {"CXXFLAGS": "-O0"},
        {"HOROVOD_CPU_OPERATIONS": "MPI"},
    ],
    ids=str,
)
def test_another_wheel_for_every(change, monkeypatch):
    arguments = {"version": "0.28.1", "with_mpi": False, "with_nccl": False}
    before = wheel_cache.place(wheel_cache.key(**arguments))
    for name, value in change.items():
        if name in arguments:
            arguments[name] = value
        else:
            monkeypatch.setenv(name, value)
    assert wheel_cache.place(wheel_cache.key(**arguments)) != before


def test_what_a_wheel_is_for():
    import tensorflow as tf

    key = wheel_cache.key("0.28.1", False, False)
    assert key["tensorflow"].endswith(f" {tf.__version__}")
    assert key["tensorflow_library"].startswith("sha256=")
    # What is found without the import is what TensorFlow says itself.
    headers = wheel_cache.tensorflow_folder() / "include"
    assert str(headers) == tf.sysconfig.get_include()


def test_the_environment_of_a_build(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/mine")
    # As under `make -j8 test`.
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", " -j8 --jobserver-auth=3,4")
    monkeypatch.setattr(horovod_recipe.toolchain, "jobs", lambda: 3)
    variables = horovod_recipe.environment(tmp_path, True, False)
    assert "HOROVOD_WITHOUT_GLOO" not in variables
    assert "HOROVOD_GPU_OPERATIONS" not in variables
    assert variables["HOROVOD_WITH_MPI"] == "1"
    assert variables["MAKEFLAGS"] == "-j3"
    *folders, last = variables["CPLUS_INCLUDE_PATH"].split(os.pathsep)
    assert last == "/mine"
    assert all(Path(folder).is_dir() for folder in folders)
    (header,) = (tmp_path / "include").rglob("xla_builder.h")
    assert '#include "xla/hlo/builder/xla_builder.h"\n' in header.read_text()


@pytest.mark.parametrize("has_old", [True, False])
def test_only_a_header_that_has_moved_is_forwarded(
    has_old, tmp_path, monkeypatch
):
    home = tmp_path / "tensorflow"
    if has_old:
        old = home / "include/tensorflow/compiler/xla/client/xla_builder.h"
        old.parent.mkdir(parents=True)
        old.touch()
    monkeypatch.setattr(wheel_cache, "tensorflow_folder", lambda: home)
    monkeypatch.delenv("CPLUS_INCLUDE_PATH", raising=False)
    variables = horovod_recipe.environment(tmp_path, False, False)
    assert "CPLUS_INCLUDE_PATH" not in variables


def test_a_cached_wheel_that_does_not_load_is_built_anew(pip, monkeypatch):
    bad = horovod_probe.Found("0.28.1", "2.21.0", False, "undefined symbol")
    good = horovod_probe.Found("0.28.1", "2.21.0", True, built={"gloo": True})
    found = [bad, good]
    monkeypatch.setattr(horovod_probe, "look", lambda: found.pop(0))
    build()
    built, loaded = horovod_build.install(
        build(), False, False, lambda what, share: None
    )
    assert not built.cached and loaded.engines == "Gloo"
    assert pip.builds() == 2


def test_a_fresh_wheel_that_does_not_load_is_an_error(pip, monkeypatch):
    bad = horovod_probe.Found("0.28.1", "2.21.0", False, "undefined symbol")
    monkeypatch.setattr(horovod_probe, "look", lambda: bad)
    built = build()
    with pytest.raises(InstallError, match="undefined symbol"):
        horovod_build.install(built, False, False, lambda what, share: None)
    assert not built.wheel.exists()


def test_a_command_is_ended_with_its_children(tmp_path):
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    pids = []

    def interrupt(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subprocesses.run_logged(
            [sys.executable, "-c", script],
            dict(os.environ),
            tmp_path / "log",
            interrupt,
        )
    assert _ended(pids[0])


def _ended(pid, limit_s=10):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1]
        except FileNotFoundError:
            return True
        # An orphan that nobody reaps has ended, too.
        if state.split()[0] == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False
