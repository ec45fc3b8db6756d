"""Wheels that were built on this machine, by what they were built for."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import platformdirs

from keras_towers.engines import toolchain
from keras_towers.engines.toolchain import InstallError

# Counts up when the way of building changes, so that old wheels are left.
_RECIPE = 1
# What of the user's environment changes what is built.
_BUILD_VARIABLES = (
    "CXX",
    "CXXFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "MPI_HOME",
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
)
# The instruction sets that Horovod compiles for where the CPU has them.
_CPU_FLAGS = ("f16c", "avx", "fma")
_TENSORFLOW_NAMES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tf-nightly",
    "tf-nightly-cpu",
)


def folder() -> Path:
    """Where wheels and logs are kept; ``KERAS_TOWERS_CACHE`` overrides it."""
    chosen = os.environ.get("KERAS_TOWERS_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("keras-towers", appauthor=False)


def tensorflow_folder() -> Path:
    """Where TensorFlow is installed, without importing it.

    Raises:
        InstallError: it is not installed.
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise InstallError(
            "TensorFlow is not installed in this environment, and engines are "
            "built for it: pip install 'keras-towers[cpu]' (or [gpu]) first."
        )
    return Path(list(spec.submodule_search_locations)[0])


def key(version: str, with_mpi: bool, with_nccl: bool) -> dict[str, str]:
    """Everything that a wheel depends on: another value, another wheel.

    Args:
        version: Horovod's.
        with_mpi: whether MPI is built in.
        with_nccl: whether NCCL is built in.

    Raises:
        InstallError: TensorFlow is not installed.
    """
    tensorflow, library = _tensorflow()
    mpi = nccl = ""
    if with_mpi:
        tool = toolchain.find_mpi()
        # Implementations are not compatible with one another.
        flags = toolchain.first_line([tool.path or "mpicxx", "-show"])
        mpi = f"{tool.version} {flags}"
    if with_nccl:
        found = toolchain.find_nccl()
        nccl = f"{found.path} {found.version}, nvcc "
        nccl += toolchain.find_nvcc().version
    chosen = {
        name: os.environ[name]
        for name in _BUILD_VARIABLES
        if name in os.environ
    }
    return {
        "recipe": str(_RECIPE),
        "horovod": version,
        "python": sysconfig.get_config_var("EXT_SUFFIX") or sys.version,
        "machine": platform.machine(),
        "cpu_flags": " ".join(cpu_flags()),
        "libc": " ".join(platform.libc_ver()),
        "tensorflow": tensorflow,
        # Says which build of this version it is, so its C++ ABI as well.
        "tensorflow_library": library,
        "with_mpi": f"{with_mpi} {mpi}".strip(),
        "with_nccl": f"{with_nccl} {nccl}".strip(),
        "environment": json.dumps(chosen, sort_keys=True),
    }


def cpu_flags() -> list[str]:
    """Those instruction sets of this CPU that Horovod would compile for."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    for line in text.splitlines():
        if line.startswith("flags"):
            words = set(line.split())
            return [flag for flag in _CPU_FLAGS if flag in words]
    return []


def place(key: dict[str, str]) -> Path:
    """The folder of the wheel with this key; it may not exist yet."""
    text = json.dumps(key, sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()[:16]
    return folder() / "horovod" / digest


def find(key: dict[str, str]) -> Path | None:
    """The wheel with this key, if it was built before."""
    return next(iter(sorted(place(key).glob("*.whl"))), None)


def store(wheel: Path, key: dict[str, str]) -> Path:
    """Put a wheel into the cache in one step, so nobody sees half of it."""
    home = place(key)
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".new-") as new:
        copy = Path(new) / wheel.name
        shutil.copyfile(wheel, copy)
        described = Path(new) / "built-for.json"
        described.write_text(json.dumps(key, indent=2) + "\n")
        os.replace(described, home / described.name)
        os.replace(copy, home / wheel.name)
    return home / wheel.name


@contextlib.contextmanager
def lock(key: dict[str, str], on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time build a wheel.

    The second waits and then finds the first one's wheel. Where files cannot
    be locked (some network disks) both build, which is only slower.

    Args:
        key: of the wheel.
        on_wait: called once before waiting for another process.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    home = place(key)
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _tensorflow() -> tuple[str, str]:
    """TensorFlow's package with version, and what tells its builds apart."""
    home = tensorflow_folder()
    library = "libtensorflow_framework.so.2"
    for name in _TENSORFLOW_NAMES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            package = metadata.distribution(name)
            record = package.read_text("RECORD") or ""
            for line in record.splitlines():
                if line.startswith(f"tensorflow/{library},"):
                    return f"{name} {package.version}", line.split(",")[1]
    with contextlib.suppress(OSError):
        return "tensorflow", f"{(home / library).stat().st_size} bytes"
    return "tensorflow", str(home)
