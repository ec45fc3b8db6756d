"""The target of builds: this environment's TensorFlow, and the CPU."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from keras_towers.building.recipe import InstallError

_TENSORFLOW_NAMES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tf-nightly",
    "tf-nightly-cpu",
)
_CPU_MODEL = ("vendor_id", "cpu family", "model", "stepping")


def facts() -> dict[str, str]:
    """Facts that the wheels of all engines depend on."""
    tensorflow, library = _tensorflow()
    return {
        "python": sysconfig.get_config_var("EXT_SUFFIX") or sys.version,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "tensorflow": tensorflow,
        # Identifies the build of this version, and so its C++ ABI.
        "tensorflow_library": library,
    }


def tensorflow_folder() -> Path:
    """Find TensorFlow without importing it, or raise ``InstallError``."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise InstallError(
            "TensorFlow is not installed in this environment, but engines are "
            "built for it: install the extra keras-towers[cpu] (or [gpu]) "
            "first."
        )
    return Path(list(spec.submodule_search_locations)[0])


def cpu_flags(wanted: Iterable[str]) -> list[str]:
    """The wanted instruction sets that this CPU supports."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    for line in text.splitlines():
        if line.startswith("flags"):
            words = set(line.split())
            return [flag for flag in wanted if flag in words]
    return []


def cpu_type() -> str:
    """This CPU as compilers see it: its model and instruction sets."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.machine()
    known = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    model = [known.get(name, "") for name in _CPU_MODEL]
    sets = " ".join(sorted(known.get("flags", "").split()))
    return f"{' '.join(model)} {hashlib.sha256(sets.encode()).hexdigest()[:8]}"


def _tensorflow() -> tuple[str, str]:
    """TensorFlow's package and version, and an identifier of the build."""
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
