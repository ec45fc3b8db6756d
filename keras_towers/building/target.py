"""The target of builds: this environment's TensorFlow, and the CPU."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from keras_towers import _imports
from keras_towers.building.recipe import InstallError

_CPU_MODEL = ("vendor_id", "cpu family", "model", "stepping")


@functools.cache
def facts() -> dict[str, str]:
    """Facts that the wheels of all engines depend on."""
    library = tensorflow_folder() / "libtensorflow_framework.so.2"
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    packages = sorted(_imports.packages("tensorflow").items())
    return {
        "python": sysconfig.get_config_var("EXT_SUFFIX") or sys.version,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "tensorflow": ", ".join(map(" ".join, packages)),
        # Identifies the build of this version, and so its C++ ABI.
        "tensorflow_library": digest,
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
    flags = _cpu().get("flags", "").split()
    return [flag for flag in wanted if flag in flags]


def cpu_type() -> str:
    """This CPU as compilers see it: its model and instruction sets."""
    known = _cpu()
    model = [known.get(name, "") for name in _CPU_MODEL]
    sets = " ".join(sorted(known.get("flags", "").split()))
    return f"{' '.join(model)} {hashlib.sha256(sets.encode()).hexdigest()[:8]}"


def _cpu() -> dict[str, str]:
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    return dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
