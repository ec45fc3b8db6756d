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

from keras_towers.system import usable_cores

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
    """A program or library of a build; its problem, if ``path`` is None."""

    name: str
    path: str | None
    version: str = ""
    problem: str = ""


def search_path() -> str:
    """The search path, with this environment's folder even if not activated."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def which(name: str) -> str | None:
    """Find a program on ``search_path()``."""
    return shutil.which(name, path=search_path())


def output_of(command: list[str]) -> str | None:
    """Return the output of a program, or None if the program fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()


def first_line(command: list[str]) -> str:
    """Return the first line that a program prints, if it does not fail."""
    return next(iter((output_of(command) or "").splitlines()), "")


def find_compiler() -> Tool:
    """Find the C++17 compiler: ``CXX``, or else one of the usual names."""
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
            return Tool(name, path, first_line([*command, "--version"]))
        said = ended.stderr.strip().splitlines()
        why = said[0] if said else f"exit code {ended.returncode}"
    problem = f"{path} does not compile a small C++17 program ({why}): {advice}"
    return Tool(name, None, problem=problem)


def find_make() -> Tool:
    """Find the program ``make``."""
    problem = (
        "make not found: install it (Debian and Ubuntu: apt-get install make)"
    )
    path = which("make")
    version = first_line([path, "--version"]) if path else ""
    return Tool("make", path, version, problem)


def find_cmake(variables: str) -> Tool:
    """Find CMake, which pip can install; the prefix is as in HOROVOD_CMAKE."""
    at_least = ".".join(map(str, CMAKE_AT_LEAST))
    path = os.environ.get(f"{variables}_CMAKE") or which("cmake")
    version = first_line([path, "--version"]) if path else ""
    found = re.search(r"(\d+)\.(\d+)", version)
    usable = found and tuple(map(int, found.groups())) >= CMAKE_AT_LEAST
    problem = f"CMake {at_least} or newer not found: pip install cmake"
    return Tool("CMake", path if usable else None, version, problem)


def find_mpi() -> Tool:
    """Find the compiler wrappers of MPI, which CMake asks for its paths."""
    names = ("mpicxx", "mpic++", "mpiCC")
    path = next(filter(None, map(which, names)), None)
    if not which("mpicc"):
        path = None  # The build needs both the C++ and the C wrapper.
    launcher = which("mpirun") or "mpirun"
    return Tool(
        "MPI",
        path,
        first_line([launcher, "--version"]) if path else "",
        "no MPI for development found (mpicxx and mpicc): install one (Debian "
        "and Ubuntu: apt-get install libopenmpi-dev openmpi-bin), or leave out "
        "--with-mpi",
    )


def problems(tools: list[Tool]) -> list[str]:
    """List the tools to install manually, of these and pip."""
    found = [tool.problem for tool in tools if tool.path is None]
    if importlib.util.find_spec("pip") is None:
        found.append(
            f"pip is not in this environment: {sys.executable} -m ensurepip, "
            "or uv pip install pip"
        )
    return found


def jobs() -> int:
    """The number of compilers that the cores and the memory allow."""
    memory = psutil.virtual_memory().total
    return max(1, min(usable_cores(), memory // _BYTES_PER_JOB))
