"""The tools for compiling an engine, and what to install if missing.

An engine shares a process with TensorFlow. If pip has installed NCCL or CUDA's
runtime, TensorFlow uses that one, so it takes precedence here.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from keras_towers.foundation import settings
from keras_towers.foundation.commands import run_command
from keras_towers.foundation.system import usable_cores

# The memory that compiling with TensorFlow's headers needs per process.
_BYTES_PER_JOB = 2 * 1024**3
_CUDA = "/usr/local/cuda"
_GPU = "pip install 'keras-towers[gpu]' installs it with TensorFlow"
# The CUDA of NVIDIA's packages, and the oldest of a driver for what they make.
_PACKAGED = 13
CUDA_PACKAGES = tuple(
    f"nvidia-{name}=={_PACKAGED}.0.*"
    for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
)
"""NVIDIA's packages of CUDA's compiler, for machines without a toolkit.

There is no such package for CUDA 12. The first CUDA 13 compiles for all drivers
of CUDA 13, and programs contain its runtime, beside that of TensorFlow.
"""


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
    with contextlib.suppress(OSError):
        ended = run_command(command, settings.TOOL_S)
        if ended.code == 0:
            return ended.stdout.strip()
    return None


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
    """Find CUDA's compiler: the machine's, or else that of packages.

    Args:
        variables: the prefix of the engine's variables.
    """
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
    driver = _driver_version()
    if driver is None or driver >= _PACKAGED:
        return Tool("nvcc", "", " ".join(CUDA_PACKAGES))
    problem = (
        "no CUDA compiler (nvcc) found. NVIDIA's packages have one, but need "
        f"a driver for CUDA {_PACKAGED}, and this machine's driver is for "
        f"CUDA {driver}: update the driver, or install the CUDA toolkit "
        f"{driver} and set {variables}_CUDA_HOME to its folder, or leave out "
        "--with-nccl"
    )
    return Tool("nvcc", None, problem=problem)


def _driver_version() -> int | None:
    """The CUDA version of this machine's driver, such as 13; None: no driver.

    An engine may be built on a machine without a GPU.
    """
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000 or None


def cuda_home(nvcc: Tool, tools: Path) -> Path:
    """Return the folder of a compiler's toolkit.

    Args:
        nvcc: what ``find_nvcc`` has found.
        tools: the folder where pip installs the build's packages.
    """
    if not nvcc.path:
        return tools / "nvidia" / f"cu{_PACKAGED}"
    return Path(nvcc.path).resolve().parents[1]


def find_cuda_runtime(variables: str) -> Tool:
    """Find the folder with ``include`` and libraries of CUDA's runtime."""
    variable = f"{variables}_CUDA_HOME"
    return _find_header(
        "CUDA",
        "cuda_runtime_api.h",
        r"#define CUDART_VERSION +(\d+)",
        [os.environ.get(variable), of_pip("cuda_runtime"), *_toolkits()],
        ", or install the CUDA toolkit of the version that TensorFlow was "
        f"built for, and set {variable} to its folder, or leave out "
        "--with-nccl",
    )


def find_nccl(variables: str) -> Tool:
    """Find the folder with NCCL's ``include`` and ``lib``."""
    variable = f"{variables}_NCCL_HOME"
    return _find_header(
        "NCCL",
        "nccl.h",
        r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)",
        [os.environ.get(variable), of_pip("nccl"), *_toolkits(), "/usr"],
        " (Debian and Ubuntu: apt-get install libnccl-dev from NVIDIA's "
        f"repository), or set {variable} to its folder",
    )


def _find_header(
    name: str,
    file: str,
    version: str,
    homes: Iterable[str | None],
    advice: str,
) -> Tool:
    """Find the first folder with a header, in which there is a version."""
    for home in filter(None, homes):
        header = Path(home, "include", file)
        if header.is_file():
            parts = re.findall(version, header.read_text(errors="replace"))
            return Tool(name, str(Path(home)), ".".join(parts))
    problem = f"{name}'s header {file} not found: {_GPU}{advice}"
    return Tool(name, None, problem=problem)


def linkable(name: str, home: str, folder: Path) -> tuple[str, str]:
    """Make a library linkable in a folder; return its folder and linker flags.

    pip's library lacks the file name that linkers look for, and no loader
    searches its folder: ../../nvidia/NAME relative to an engine's library.

    Args:
        name: of NVIDIA's package, ``"nccl"`` or ``"cuda_runtime"``.
        home: the folder of the library.
        folder: a folder that does not exist yet.
    """
    if home != of_pip(name):
        return home, ""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(f"{home}/include")
    for library in Path(home, "lib").glob("*.so.*"):
        link = library.name.partition(".so")[0] + ".so"
        (folder / "lib" / link).symlink_to(library)
    return str(folder), f"-Wl,-rpath,$ORIGIN/../../nvidia/{name}/lib"


def _toolkits() -> Iterator[str]:
    yield from filter(None, (os.environ.get("CUDA_HOME"), _CUDA))


def of_pip(name: str) -> str | None:
    """The folder of NVIDIA's package of a name, if pip has installed it."""
    try:
        spec = importlib.util.find_spec(f"nvidia.{name}")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or []) if spec else []
    return folders[0] if folders else None


def problems(tools: list[Tool]) -> list[str]:
    """List the problems with these tools and pip."""
    texts = [tool.problem for tool in tools if tool.path is None]
    if importlib.util.find_spec("pip") is None:
        texts.append(
            f"pip is not in this environment: {sys.executable} -m ensurepip, "
            "or uv pip install pip"
        )
    return texts


def jobs() -> int:
    """The number of compilers that the cores and the memory allow."""
    memory = psutil.virtual_memory().total
    return max(1, min(usable_cores(), memory // _BYTES_PER_JOB))
