"""NVIDIA's compiler, CUDA runtime and NCCL, for builds for GPUs.

An engine shares a process with TensorFlow, whose libraries are pip's if pip has
installed any: these come first.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_towers.building.toolchain import Tool, output_of, which

_DEFAULT = "/usr/local/cuda"
_GPU = "pip install 'keras-towers[gpu]' installs it with TensorFlow"
_RUNTIME = "cuda_runtime"
# Packages with headers that those of pip's CUDA runtime include.
_PARTS = {"cuda_nvcc": "crt/host_config.h", "cuda_cccl": "nv/target"}
_PIP_PARTS = " ".join(
    f"nvidia-{name.replace('_', '-')}-cu12" for name in (_RUNTIME, *_PARTS)
)


def find_nvcc(variables: str) -> Tool:
    """Find CUDA's compiler; ``variables`` is the prefix of the engine's."""
    own = os.environ.get(f"{variables}_CUDA_HOME")
    candidates = [
        # Only the engine's own variable takes precedence over the search path.
        f"{own}/bin/nvcc" if own else None,
        which("nvcc"),
        *(f"{home}/bin/nvcc" for home in _toolkits()),
    ]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            said = output_of([path, "--version"])
            if said is not None:
                found = re.search(r"release [\d.]+", said)
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
    include = os.environ.get(f"{variables}_NCCL_INCLUDE")
    if include and (Path(include) / "nccl.h").is_file():
        text = (Path(include) / "nccl.h").read_text(errors="replace")
        home: str | None = include
    else:
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
    """Make a library of pip's one to link to; return its folder and rpath."""
    # It lacks the file name that linkers look for, and no loader looks into
    # its folder, which is at ../../nvidia from that of an engine's library.
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
    return [*filter(None, _parts())] if home == _package(_RUNTIME) else []


def _parts() -> list[str | None]:
    """The ``include`` of each of ``_PARTS``, None where one is missing."""
    found: list[str | None] = []
    for name, header in _PARTS.items():
        folder = Path(_package(name) or "/nonexistent", "include")
        found.append(str(folder) if (folder / header).is_file() else None)
    return found


def _toolkits() -> Iterator[str]:
    yield from filter(None, (os.environ.get("CUDA_HOME"), _DEFAULT))


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
