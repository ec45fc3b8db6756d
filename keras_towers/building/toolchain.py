"""The tools for compiling an engine, and what to install if missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from keras_towers.cores import usable_cores

CMAKE_AT_LEAST = (3, 13)
# The memory that compiling with TensorFlow's headers needs per process.
_BYTES_PER_JOB = 2 * 1024**3
_CPP17 = """\
#include <optional>
#include <string_view>
static_assert(__cplusplus >= 201703L, "C++17");
int main() { return std::optional<int>(0).value(); }
"""


@dataclass(frozen=True)
class Tool:
    """A program that a build needs.

    Attributes:
        name: its display name.
        path: the command to run it, or None if missing or unusable.
        version: the version that it reports.
        problem: why it cannot be used, and what to install.
    """

    name: str
    path: str | None
    version: str = ""
    problem: str = ""


def search_path() -> str:
    """The search path for programs, this environment's folder first.

    So the environment's programs are found even if it is not activated.
    """
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def which(name: str) -> str | None:
    """Find a program on ``search_path()``."""
    return shutil.which(name, path=search_path())


def first_line(command: list[str]) -> str | None:
    """The first line that a program prints, or None if it fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(ended.stdout.strip().splitlines()), "")


def find_compiler() -> Tool:
    """The C++17 compiler: ``CXX``, or else one of the usual names."""
    name = "C++17 compiler"
    advice = (
        "install one (Debian and Ubuntu: apt-get install g++; Fedora: dnf "
        "install gcc-c++), or set the environment variable CXX"
    )
    chosen = os.environ.get("CXX")
    path = chosen or which("c++") or which("g++") or which("clang++")
    if not path:
        return Tool(name, None, problem=f"no C++ compiler found: {advice}")
    command = shlex.split(path)
    flags = ["-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    try:
        ended = subprocess.run(
            [*command, *flags],
            input=_CPP17,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    else:
        if ended.returncode == 0:
            return Tool(name, path, first_line([*command, "--version"]) or "")
        said = ended.stderr.strip().splitlines()
        why = said[0] if said else f"exit code {ended.returncode}"
    return Tool(
        name,
        None,
        problem=f"{path} does not compile a small C++17 program ({why}): "
        f"{advice}",
    )


def find_make() -> Tool:
    """The program ``make``."""
    path = which("make")
    if path:
        return Tool("make", path, first_line([path, "--version"]) or "")
    return Tool(
        "make",
        None,
        problem="make not found: install it (Debian and Ubuntu: apt-get "
        "install make)",
    )


def find_cmake(variables: str) -> Tool:
    """CMake; if it is missing or too old, pip can install it.

    Args:
        variables: the prefix of the engine's environment variables, one of
            which may specify CMake's path.
    """
    at_least = ".".join(map(str, CMAKE_AT_LEAST))
    problem = f"CMake {at_least} or newer not found: pip install cmake"
    path = os.environ.get(f"{variables}_CMAKE") or which("cmake")
    if not path:
        return Tool("CMake", None, problem=problem)
    version = first_line([path, "--version"]) or ""
    found = re.search(r"(\d+)\.(\d+)", version)
    if not found or tuple(map(int, found.groups())) < CMAKE_AT_LEAST:
        return Tool("CMake", None, version, problem)
    return Tool("CMake", path, version)


def find_mpi() -> Tool:
    """MPI's compiler wrappers, by which CMake finds headers and libraries."""
    names = ("mpicxx", "mpic++", "mpiCC")
    path = next(filter(None, map(which, names)), None)
    # The build needs both the C++ and the C wrapper.
    if path and which("mpicc"):
        launcher = which("mpirun") or "mpirun"
        return Tool("MPI", path, first_line([launcher, "--version"]) or "")
    return Tool(
        "MPI",
        None,
        problem="no MPI for development found (mpicxx and mpicc): install one "
        "(Debian and Ubuntu: apt-get install libopenmpi-dev openmpi-bin), or "
        "leave out --with-mpi",
    )


def problems(tools: list[Tool]) -> list[str]:
    """What must be installed manually before a build can start.

    Args:
        tools: the tools that the build needs, besides pip.
    """
    found = [tool.problem for tool in tools if tool.path is None]
    if importlib.util.find_spec("pip") is None:
        found.append(
            f"pip is not in this environment: {sys.executable} -m ensurepip, "
            "or uv pip install pip"
        )
    return found


def jobs() -> int:
    """How many compiler processes the cores and the memory allow."""
    memory = psutil.virtual_memory().total
    return max(1, min(usable_cores(), memory // _BYTES_PER_JOB))
