"""What is said about a machine that lacks something."""

import os
import stat
from types import SimpleNamespace

import pytest

from keras_towers.building import toolchain
from keras_towers.building.horovod import Horovod

pytestmark = pytest.mark.core


def problems(recipe):
    return toolchain.problems(recipe.tools())


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Make programs of the given texts the only ones on the search path."""
    monkeypatch.setattr(toolchain, "search_path", lambda: str(tmp_path))
    for name in ("CXX", "X_CMAKE"):
        monkeypatch.delenv(name, raising=False)

    def make(**programs):
        for name, text in programs.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path

    return make


def test_nothing_there(only):
    only()
    compiler, make = problems(Horovod())
    assert "no C++ compiler found" in compiler and "install g++" in compiler
    assert "install make" in make


def test_what_is_missing_for_mpi(only):
    # Gloo needs MPI's compiler for C as well.
    only(make="echo GNU Make", mpicxx="exit 0", **{"c++": "exit 0"})
    (problem,) = problems(Horovod(with_mpi=True))
    assert "libopenmpi-dev" in problem


def test_a_compiler_that_does_not_know_cpp17(only):
    only(**{"c++": "echo 'c++: unrecognized option -std=c++17' >&2; exit 1"})
    problem = toolchain.find_compiler().problem
    assert "does not compile a small C++17 program" in problem
    assert "unrecognized option -std=c++17" in problem


def test_the_compiler_that_the_user_names(only, monkeypatch):
    folder = only(mine="echo mine 1.0")
    monkeypatch.setenv("CXX", f"{folder}/mine --flag")
    assert toolchain.find_compiler().path == f"{folder}/mine --flag"
    monkeypatch.setenv("CXX", f"{folder}/gone")
    assert f"{folder}/gone does not compile" in (
        toolchain.find_compiler().problem
    )


@pytest.mark.parametrize(
    ("version", "usable"), [("3.12.4", False), ("3.13.0", True), ("4.1", True)]
)
def test_cmake_is_new_enough(only, version, usable):
    only(cmake=f"echo cmake version {version}")
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
