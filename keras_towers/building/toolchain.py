"""What a machine has to compile an engine with, and what to install if not."""

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
# A compiler process on TensorFlow's headers takes up to this much memory.
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
        name: what it is, for people.
        path: the command to run it, or None if it is missing or unusable.
        version: what it says about itself.
        problem: why it cannot be used, with what to install.
    """

    name: str
    path: str | None
    version: str = ""
    problem: str = ""


def search_path() -> str:
    """The search path for programs, this environment's own folder first.

    A command of an environment that is not activated finds its neighbours so.
    """
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def which(name: str) -> str | None:
    """Find a program on ``search_path()``."""
    return shutil.which(name, path=search_path())


def first_line(command: list[str]) -> str | None:
    """The first line that a program prints, or None if it does not run."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(ended.stdout.strip().splitlines()), "")


def find_compiler() -> Tool:
    """The C++ compiler: ``CXX``, else the usual names; it must know C++17."""
    name = "C++17 compiler"
    advice = (
        "install one (Debian and Ubuntu: apt-get install g++; Fedora: dnf "
        "install gcc-c++), or name it in the environment variable CXX"
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
        why = said[0] if said else f"it ended with {ended.returncode}"
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
    """CMake; where it is missing or too old, pip can bring it.

    Args:
        variables: how the names of the engine's environment variables begin,
            by one of which the user may say where CMake is.
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
    """MPI's compiler wrappers, which CMake asks for headers and libraries."""
    names = ("mpicxx", "mpic++", "mpiCC")
    path = next(filter(None, map(which, names)), None)
    # What is written in C++ may bring a library that is written in C.
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


def find_nvcc(variables: str) -> Tool:
    """CUDA's compiler; ``variables`` as of ``find_cmake``."""
    homes = (
        os.environ.get(f"{variables}_CUDA_HOME"),
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
    )
    candidates = [f"{home}/bin/nvcc" for home in homes if home]
    # Only the engine's own variable goes before what the user would run.
    candidates.insert(1 if homes[0] else 0, which("nvcc") or "")
    for path in candidates:
        if path and os.access(path, os.X_OK):
            version = first_line([path, "--version"])
            if version is not None:
                return Tool("nvcc", path, _nvcc_release(path))
    return Tool(
        "nvcc",
        None,
        problem="no CUDA compiler found (nvcc): install NVIDIA's CUDA toolkit "
        "of the version that TensorFlow was built for, and name its folder in "
        f"{variables}_CUDA_HOME, or leave out --with-nccl",
    )


def find_nccl(variables: str) -> Tool:
    """The folder with NCCL's ``include`` and ``lib``.

    What the user names comes first, then the package that TensorFlow's GPU
    build installs, then the system's.

    Args:
        variables: as of ``find_cmake``.
    """
    homes = [os.environ.get(f"{variables}_NCCL_HOME"), _pip_nccl()]
    homes += [os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr"]
    include = os.environ.get(f"{variables}_NCCL_INCLUDE")
    if include and (Path(include) / "nccl.h").is_file():
        return Tool("NCCL", include, _nccl_version(Path(include) / "nccl.h"))
    for home in homes:
        header = Path(home or "/nonexistent") / "include" / "nccl.h"
        if home and header.is_file():
            return Tool("NCCL", home, _nccl_version(header))
    return Tool(
        "NCCL",
        None,
        problem="NCCL's header nccl.h not found: pip install "
        "'keras-towers[gpu]' brings it with TensorFlow (Debian and Ubuntu: "
        "apt-get install libnccl-dev from NVIDIA's repository), or name its "
        f"folder in {variables}_NCCL_HOME",
    )


def is_pip_nccl(home: str) -> bool:
    """Whether this is the NCCL that TensorFlow's GPU build installs."""
    return home == _pip_nccl()


def problems(tools: list[Tool]) -> list[str]:
    """What has to be installed by hand before a build can start.

    Args:
        tools: what the build needs, beside pip.
    """
    found = [tool.problem for tool in tools if tool.path is None]
    if importlib.util.find_spec("pip") is None:
        found.append(
            f"pip is not in this environment: {sys.executable} -m ensurepip, "
            "or uv pip install pip"
        )
    return found


def jobs() -> int:
    """How many compiler processes fit the cores and the memory."""
    memory = psutil.virtual_memory().total
    return max(1, min(usable_cores(), memory // _BYTES_PER_JOB))


def _pip_nccl() -> str | None:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or []) if spec else []
    return folders[0] if folders else None


def _nvcc_release(path: str) -> str:
    ended = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=60
    )
    found = re.search(r"release [\d.]+", ended.stdout)
    return found.group() if found else ""


def _nccl_version(header: Path) -> str:
    text = header.read_text(errors="replace")
    parts = [
        re.search(rf"#define NCCL_{part} (\d+)", text)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(part.group(1) for part in parts if part)
