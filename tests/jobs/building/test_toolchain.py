"""What is said about a machine that lacks something, and what is found."""

import os
import platform
import re
import stat
from types import SimpleNamespace

import pytest

from keras_towers.engines.byteps.byteps_recipe import BytePS
from keras_towers.engines.horovod.horovod_recipe import Horovod
from keras_towers.jobs.building import toolchain


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Make programs of the given texts all that there is for builds."""
    monkeypatch.setattr(toolchain, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(toolchain, "_toolkits", lambda: iter(()))
    monkeypatch.setattr(toolchain, "of_pip", lambda name: None)
    for name in ("CXX", "BYTEPS_CUDA_HOME", "BYTEPS_NCCL_HOME"):
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
NO_CUDA = "cuda_runtime_api.h not found.* BYTEPS_CUDA_HOME"
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


def test_the_environments_own_programs_come_first(monkeypatch):
    monkeypatch.setenv("PATH", "/somewhere")
    assert toolchain.search_path().endswith(f"{os.pathsep}/somewhere")


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        # On a machine without a GPU, too.
        (None, "nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.*"),
        (13, "nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.*"),
        (12, "a driver for CUDA 13, and this machine's driver is for CUDA 12"),
    ],
)
def test_a_machine_without_a_cuda_compiler(only, monkeypatch, driver, found):
    only(THERE)
    monkeypatch.setattr(toolchain, "_driver_version", lambda: driver)
    nvcc = toolchain.find_nvcc("HOROVOD")
    packages = Horovod(with_nccl=True).packages()
    assert found in (nvcc.version or nvcc.problem)
    assert (nvcc.path is None) == (driver == 12)
    assert set(toolchain.CUDA_PACKAGES) <= set(packages)
    assert not set(toolchain.CUDA_PACKAGES) & set(Horovod().packages())


def test_jobs_fit_the_memory(monkeypatch):
    monkeypatch.setattr(toolchain, "usable_cores", lambda: 64)
    memory = SimpleNamespace(total=2**32)
    monkeypatch.setattr(toolchain.psutil, "virtual_memory", lambda: memory)
    assert toolchain.jobs() == 2


def test_nccl_of_pip_and_of_the_user(nccl_of_pip, tmp_path, monkeypatch):
    found = toolchain.find_nccl("X")
    assert (found.path, found.version) == (str(nccl_of_pip), "2.27.3")
    home = tmp_path / "mine"
    monkeypatch.setenv("X_NCCL_HOME", str(home))
    (home / "include").mkdir(parents=True)
    (home / "include/nccl.h").write_text("")
    assert toolchain.find_nccl("X").path == str(home)
    linked = toolchain.linkable("nccl", str(home), tmp_path / "links")
    assert linked == (str(home), "")
