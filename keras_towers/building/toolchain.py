"""The tools for compiling an engine, and what to install if missing.

An engine shares a process with TensorFlow. If pip has installed NCCL,
TensorFlow uses that one, so it takes precedence here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from keras_towers import settings
from keras_towers.system import usable_cores

# The memory that compiling with TensorFlow's headers needs per process.
_BYTES_PER_JOB = 2 * 1024**3
_CUDA = "/usr/local/cuda"
_GPU = "pip install 'keras-towers[gpu]' installs it with TensorFlow"


@dataclass(frozen=True)
class Tool:
    """A program or library of a build; if ``path`` is None, the problem."""

    name: str
    path: str | None
    version: str = ""
    problem: str = ""


def search_path() -> str:
    """The search path, with this environment's folder even if not activated."""
    programs = str(Path(sys.executable).parent)
    return os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])


def which(name: str) -> str | None:
    """Find a program on ``search_path()``."""
    return shutil.which(name, path=search_path())


def output_of(command: list[str]) -> str | None:
    """Return the output of a program, or None if the program fails."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=settings.TOOL_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()


def find_compiler() -> Tool:
    """Find the C++17 compiler: ``CXX``, or else one of the usual names."""
    chosen = os.environ.get("CXX")
    path = chosen or which("c++") or which("g++") or which("clang++")
    checked = "-std=c++17 -fsyntax-only -x c++ /dev/null"
    usable = path and output_of(shlex.split(f"{path} {checked}")) is not None
    return Tool(
        "C++17 compiler",
        path if usable else None,
        problem=f"no C++17 compiler found ({path or 'c++'}): install one "
        "(Debian and Ubuntu: apt-get install g++; Fedora: dnf install "
        "gcc-c++), or set the environment variable CXX",
    )


def find_make() -> Tool:
    """Find the program ``make``."""
    return Tool(
        "make",
        which("make"),
        problem="make not found: install it (Debian and Ubuntu: apt-get "
        "install make)",
    )


def find_mpi() -> Tool:
    """Find MPI's compiler wrappers, from which CMake gets the paths."""
    names = ("mpicxx", "mpic++", "mpiCC")
    path = next(filter(None, map(which, names)), None)
    if not which("mpicc"):
        path = None  # The build needs both the C++ and the C wrapper.
    return Tool(
        "MPI",
        path,
        output_of([which("mpirun") or "mpirun", "--version"]) or "",
        "no MPI for development found (mpicxx and mpicc): install one (Debian "
        "and Ubuntu: apt-get install libopenmpi-dev openmpi-bin), or leave out "
        "--with-mpi",
    )


def find_nvcc(variables: str) -> Tool:
    """Find CUDA's compiler; ``variables`` is the prefix of the engine's."""
    chosen = os.environ.get(f"{variables}_CUDA_HOME")
    candidates = [
        # Only the engine's own variable takes precedence over the search path.
        f"{chosen}/bin/nvcc" if chosen else None,
        which("nvcc"),
        *[f"{home}/bin/nvcc" for home in _toolkits()],
    ]
    for path in filter(None, candidates):
        version = output_of([path, "--version"])
        if version is not None:
            return Tool("nvcc", path, version)
    problem = (
        "no CUDA compiler found (nvcc): install NVIDIA's CUDA toolkit of the "
        f"version that TensorFlow was built for, and set {variables}_CUDA_HOME "
        "to its folder, or leave out --with-nccl"
    )
    return Tool("nvcc", None, problem=problem)


def cuda_home(variables: str) -> str:
    """Return the folder of the toolkit that ``find_nvcc`` has found."""
    nvcc = find_nvcc(variables).path or ""
    return str(Path(nvcc).resolve().parents[1])


def find_nccl(variables: str) -> Tool:
    """Find the folder with NCCL's ``include`` and ``lib``."""
    homes = [
        os.environ.get(f"{variables}_NCCL_HOME"),
        _nccl_of_pip(),
        *_toolkits(),
        "/usr",
    ]
    for home in filter(None, homes):
        header = Path(home, "include", "nccl.h")
        if header.is_file():
            text = header.read_text(errors="replace")
            parts = re.findall(
                r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", text
            )
            return Tool("NCCL", str(Path(home)), ".".join(parts))
    problem = (
        f"NCCL's header nccl.h not found: {_GPU} (Debian and Ubuntu: apt-get "
        "install libnccl-dev from NVIDIA's repository), or set "
        f"{variables}_NCCL_HOME to its folder"
    )
    return Tool("NCCL", None, problem=problem)


def linkable_nccl(home: str, folder: Path) -> tuple[str, str]:
    """Make NCCL linkable in a folder; return its folder and the linker's flags.

    pip's library lacks the file name that linkers look for, and no loader
    searches its folder: ../../nvidia/nccl relative to an engine's library.
    """
    if home != _nccl_of_pip():
        return home, ""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(f"{home}/include")
    (library,) = Path(home, "lib").glob("libnccl.so.*")
    (folder / "lib" / "libnccl.so").symlink_to(library)
    return str(folder), "-Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib"


def _toolkits() -> Iterator[str]:
    yield from filter(None, (os.environ.get("CUDA_HOME"), _CUDA))


def _nccl_of_pip() -> str | None:
    """The folder of NVIDIA's package, if pip has installed it."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or []) if spec else []
    return folders[0] if folders else None


def problems(tools: list[Tool]) -> list[str]:
    """List the problems with these tools and pip."""
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
