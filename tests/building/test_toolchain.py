"""What is said about a machine that lacks something, and what is found."""

import os
import platform
import re
import stat
from types import SimpleNamespace

import pytest

from keras_towers.building import toolchain
from keras_towers.engines.byteps.byteps_recipe import BytePS
from keras_towers.engines.horovod.horovod_recipe import Horovod


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Make programs of the given texts all that there is for builds."""
    monkeypatch.setattr(toolchain, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(toolchain, "_toolkits", lambda: iter(()))
    monkeypatch.setattr(toolchain, "_package", lambda name: None)
    for name in ("CXX", "X_CMAKE", "BYTEPS_CUDA_HOME", "BYTEPS_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)

    def make(programs):
        for name, text in programs.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path

    return make


THERE = {"c++": "exit 0", "make": "echo GNU Make"}
# Gloo needs MPI's compiler for C as well.
HALF_OF_MPI = THERE | {"mpicxx": "exit 0"}
OLD = THERE | {"c++": "echo 'c++: no option -std=c++17' >&2; exit 1"}
NO_COMPILER = "no C..17 compiler found .*c\\+\\+.: .* install g.."
NO_CUDA = "cuda_runtime.h, .*not found.* nvidia-cuda-.* BYTEPS_CUDA_HOME"
NO_NCCL = "nccl.h not found.* BYTEPS_NCCL_HOME"
OTHER_CPU = "x86-64 .* aarch64"


@pytest.mark.parametrize(
    ("recipe", "programs", "said"),
    [
        (Horovod(), {}, [NO_COMPILER, "make not found.* install make"]),
        (Horovod(), OLD, [NO_COMPILER]),
        (Horovod(with_mpi=True), HALF_OF_MPI, ["libopenmpi-dev"]),
        (BytePS(with_nccl=True), THERE, [OTHER_CPU, NO_CUDA, NO_NCCL]),
        (BytePS(), THERE, []),
    ],
)
def test_what_is_missing(recipe, programs, said, only, monkeypatch):
    machine = "aarch64" if OTHER_CPU in said else "x86_64"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    only(programs)
    found = toolchain.problems(recipe.tools())
    for problem, text in zip(found, said, strict=True):
        assert re.search(text, problem), problem


def test_the_compiler_that_the_user_names(only, monkeypatch):
    folder = only({"mine": "echo mine 1.0"})
    monkeypatch.setenv("CXX", f"{folder}/mine --flag")
    assert toolchain.find_compiler().path == f"{folder}/mine --flag"
    monkeypatch.setenv("CXX", f"{folder}/gone")
    assert f"found ({folder}/gone)" in toolchain.find_compiler().problem


@pytest.mark.parametrize(
    ("version", "usable"), [("3.12.4", False), ("3.13.0", True), ("4.1", True)]
)
def test_cmake_is_new_enough(only, version, usable):
    only({"cmake": f"echo cmake version {version}"})
    tool = toolchain.find_cmake("X")
    assert (tool.path is not None) == usable
    assert usable or "pip install cmake" in tool.problem


def test_the_environments_own_programs_come_first(monkeypatch):
    monkeypatch.setenv("PATH", "/somewhere")
    assert toolchain.search_path().endswith(f"{os.pathsep}/somewhere")


def test_jobs_fit_the_memory(monkeypatch):
    monkeypatch.setattr(toolchain, "usable_cores", lambda: 64)
    memory = SimpleNamespace(total=2**32)
    monkeypatch.setattr(toolchain.psutil, "virtual_memory", lambda: memory)
    assert toolchain.jobs() == 2


def test_nvidias_packages_of_pip(pip_packages, monkeypatch):
    found = [toolchain.find_cuda("X"), toolchain.find_nccl("X")]
    homes = [str(pip_packages / name) for name in ("cuda_runtime", "nccl")]
    assert [tool.path for tool in found] == homes
    assert [tool.version for tool in found] == ["12.5", "2.27.3"]
    # A runtime without the headers that it includes is of no use.
    (pip_packages / "cuda_cccl/include/nv/target").unlink()
    monkeypatch.setattr(toolchain, "_toolkits", lambda: iter(()))
    assert toolchain.find_cuda("X").path != homes[0]


@pytest.mark.parametrize(
    ("name", "find", "header"),
    [
        ("X_CUDA_HOME", toolchain.find_cuda, "cuda_runtime.h"),
        ("X_NCCL_HOME", toolchain.find_nccl, "nccl.h"),
    ],
)
def test_the_users_choice(
    name, find, header, tmp_path, pip_packages, monkeypatch
):
    home = tmp_path / "mine"
    monkeypatch.setenv(name, str(home))
    (home / "include").mkdir(parents=True)
    (home / "include" / header).write_text("")
    assert find("X").path == str(home)
    assert toolchain.linkable(str(home), tmp_path / "links") == (str(home), "")
