"""The tools for compiling an engine, and what to install if missing.

An engine shares a process with TensorFlow, whose CUDA and NCCL are pip's if pip
has installed any: these come first.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from keras_towers import settings
from keras_towers.system import usable_cores

CMAKE_AT_LEAST = (3, 13)
# The memory that compiling with TensorFlow's headers needs per process.
_BYTES_PER_JOB = 2 * 1024**3
_CUDA = "/usr/local/cuda"
_GPU = "pip install 'keras-towers[gpu]' installs it with TensorFlow"
_RUNTIME = "cuda_runtime"
# Packages with headers that those of pip's CUDA runtime include.
_PARTS = {"cuda_nvcc": "crt/host_config.h", "cuda_cccl": "nv/target"}
_PIP_PARTS = " ".join(
    f"nvidia-{name.replace('_', '-')}-cu12" for name in (_RUNTIME, *_PARTS)
)


@dataclass(frozen=True)
class Tool:
    """A program or library of a build; its problem, if ``path`` is None."""

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


def first_line(command: list[str]) -> str:
    """Return the first line that a program prints, if it does not fail."""
    return next(iter((output_of(command) or "").splitlines()), "")


def find_compiler() -> Tool:
    """Find the C++17 compiler: ``CXX``, or else one of the usual names."""
    chosen = os.environ.get("CXX")
    path = chosen or which("c++") or which("g++") or which("clang++")
    checked = "-std=c++17 -fsyntax-only -x c++ /dev/null"
    usable = path and output_of(shlex.split(f"{path} {checked}")) is not None
    return Tool(
        "C++17 compiler",
        path if usable else None,
        first_line([*shlex.split(path), "--version"]) if path else "",
        f"no C++17 compiler found ({path or 'c++'}): install one (Debian and "
        "Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or set the "
        "environment variable CXX",
    )


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


def find_nvcc(variables: str) -> Tool:
    """Find CUDA's compiler; ``variables`` is the prefix of the engine's."""
    chosen = os.environ.get(f"{variables}_CUDA_HOME")
    candidates = [
        # Only the engine's own variable takes precedence over the search path.
        f"{chosen}/bin/nvcc" if chosen else None,
        which("nvcc"),
        *[f"{home}/bin/nvcc" for home in _toolkits()],
    ]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            printed = output_of([path, "--version"])
            if printed is not None:
                found = re.search(r"release [\d.]+", printed)
                return Tool("nvcc", path, found.group() if found else "")
    problem = (
        "no CUDA compiler found (nvcc): install NVIDIA's CUDA toolkit of the "
        f"version that TensorFlow was built for, and set {variables}_CUDA_HOME "
        "to its folder, or leave out --with-nccl"
    )
    return Tool("nvcc", None, problem=problem)


def find_cuda(variables: str) -> Tool:
    """Find the folder with the ``include`` and libraries of CUDA's runtime."""
    nvcc = which("nvcc")
    home = _home(
        "cuda_runtime.h",
        os.environ.get(f"{variables}_CUDA_HOME"),
        _package(_RUNTIME) if all(_parts()) else None,
        str(Path(nvcc).resolve().parents[1]) if nvcc else None,
        *_toolkits(),
        "/usr",
    )
    text = _text(home, "cuda_runtime_api.h")
    found = re.search(r"#define CUDART_VERSION +(\d+)", text)
    number = int(found.group(1)) if found else 0
    return Tool(
        "CUDA runtime",
        home,
        f"{number // 1000}.{number % 1000 // 10}" if number else "",
        "CUDA's header cuda_runtime.h, or one that it includes, not found: pip "
        f"install {_PIP_PARTS}; or install NVIDIA's CUDA toolkit of the "
        f"version that TensorFlow was built for, and set {variables}_CUDA_HOME "
        "to its folder",
    )


def find_nccl(variables: str) -> Tool:
    """Find the folder with NCCL's ``include`` and ``lib``."""
    home = _home(
        "nccl.h",
        os.environ.get(f"{variables}_NCCL_HOME"),
        _package("nccl"),
        *_toolkits(),
        "/usr",
    )
    text = _text(home, "nccl.h")
    parts = [
        re.search(rf"#define NCCL_{part} (\d+)", text)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return Tool(
        "NCCL",
        home,
        ".".join(part.group(1) for part in parts if part),
        f"NCCL's header nccl.h not found: {_GPU} (Debian and Ubuntu: apt-get "
        "install libnccl-dev from NVIDIA's repository), or set "
        f"{variables}_NCCL_HOME to its folder",
    )


def linkable(home: str, folder: Path) -> tuple[str, str]:
    """Make a library that pip installed linkable; return its folder and rpath.

    Such a library lacks the file name that linkers look for, and no loader
    looks into its folder: ../../nvidia, seen from that of an engine's library.
    """
    found = re.fullmatch(r".*/(nvidia/\w+)", home)
    if not found or home != _package(Path(home).name):
        return home, ""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(f"{home}/include")
    for library in Path(home, "lib").glob("lib*.so.*"):
        link = library.name.partition(".so")[0] + ".so"
        (folder / "lib" / link).symlink_to(library)
    return str(folder), f"$ORIGIN/../../{found.group(1)}/lib"


def rpath(places: Sequence[str]) -> str:
    """Return the linker's option for a loader's search path, maybe empty."""
    named = [f"-rpath,{place}" for place in places if place]
    return ",".join(("-Wl", *named)) if named else ""


def headers_of_parts(home: str) -> list[str]:
    """Folders of headers that the headers of pip's CUDA runtime include."""
    parts = _parts() if home == _package(_RUNTIME) else []
    return [f"{part}/include" for part in filter(None, parts)]


def _parts() -> list[str | None]:
    """The folder of each of ``_PARTS``, None where one is missing."""
    return [_home(header, _package(name)) for name, header in _PARTS.items()]


def _toolkits() -> Iterator[str]:
    yield from filter(None, (os.environ.get("CUDA_HOME"), _CUDA))


def _home(header: str, *homes: str | None) -> str | None:
    """Return the first folder with this header."""
    for home in filter(None, homes):
        if Path(home, "include", header).is_file():
            return str(Path(home))
    return None


def _package(name: str) -> str | None:
    """The folder of a package of NVIDIA's, if pip has installed it."""
    try:
        spec = importlib.util.find_spec(f"nvidia.{name}")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or []) if spec else []
    return folders[0] if folders else None


def _text(home: str | None, header: str) -> str:
    path = Path(home or "/nonexistent", "include", header)
    return path.read_text(errors="replace") if path.is_file() else ""


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
