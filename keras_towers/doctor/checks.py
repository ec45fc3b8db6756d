"""Checks versions, devices, engines and build tools."""

from __future__ import annotations

import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from keras_towers.building import nvidia, toolchain
from keras_towers.building.byteps import BytePS
from keras_towers.building.horovod import Horovod
from keras_towers.building.recipe import Found
from keras_towers.doctor import byteps, probe
from keras_towers.doctor.findings import Finding, Status
from keras_towers.system import usable_cores

INSTALL_HOROVOD = "keras-towers install horovod"
_INSTALL_TENSORFLOW = (
    "install the extra keras-towers[cpu], or keras-towers[gpu] with NVIDIA "
    "GPUs (in a checkout: pip install '.[cpu]')"
)


def look() -> list[Finding]:
    """Run all checks that need no training."""
    # Each starts a process that imports TensorFlow.
    with ThreadPoolExecutor(2) as pool:
        facts_later = pool.submit(probe.look)
        horovod_later = pool.submit(Horovod().look)
        byteps_later = pool.submit(BytePS().look)
        facts, horovod = facts_later.result(), horovod_later.result()
        byteps_found = byteps_later.result()
    return [
        *versions(facts),
        *devices(facts),
        *engines(facts, horovod),
        byteps.finding(facts, byteps_found),
        *build_tools(needed=horovod is None or not horovod.loads),
    ]


def versions(facts: dict[str, Any]) -> list[Finding]:
    """Python, TensorFlow and Keras, and whether they are compatible."""
    group = "Versions"
    packages: dict[str, dict[str, str]] = facts.get("packages", {})
    found = [
        _python(),
        Finding(group, "keras-towers", _own_version()),
        *(
            _side_by_side(*item)
            for item in packages.items()
            if len(item[1]) > 1
        ),
    ]
    backend = facts.get("backend", "tensorflow")
    if backend != "tensorflow":
        advice = "Set KERAS_BACKEND=tensorflow (or change ~/.keras/keras.json)."
        found.append(
            Finding(group, "Keras's backend", backend, Status.BAD, advice)
        )
    if "error" in facts:
        return [
            *found,
            Finding(
                group,
                "TensorFlow",
                f"does not import: {facts['error']}",
                Status.BAD,
                f"Install a TensorFlow that works: {_INSTALL_TENSORFLOW}.",
            ),
        ]
    known = known_versions(facts.get("known_to_work", ""))
    found.append(_library("TensorFlow", facts, known))
    if "keras_error" in facts:
        if backend != "tensorflow":
            return found
        value = f"does not import: {facts['keras_error']}"
        advice = "Install Keras 3: pip install --upgrade keras."
        return [*found, Finding(group, "Keras", value, Status.BAD, advice)]
    found.append(_library("Keras", facts, known))
    if "compat_error" in facts:
        found.append(
            Finding(
                group,
                "keras_towers",
                "does not work with these versions",
                Status.BAD,
                facts["compat_error"],
            )
        )
    return found


def devices(facts: dict[str, Any]) -> list[Finding]:
    """The devices to train on."""
    group = "Devices"
    found = [Finding(group, "CPU cores", str(usable_cores()))]
    if "gpus" not in facts:
        return found
    gpus = facts["gpus"]
    if gpus:
        kinds = {name: gpus.count(name) for name in gpus}
        value = ", ".join(f"{n} x {name}" for name, n in kinds.items())
        found.append(Finding(group, "GPUs", value))
    elif Path("/dev/nvidia0").exists():
        found.append(
            Finding(
                group,
                "GPUs",
                "present, but not visible to TensorFlow",
                Status.WARNING,
                "To train on the GPU: pip uninstall tensorflow-cpu; pip "
                "install 'keras-towers[gpu]'; then check nvidia-smi and "
                "CUDA_VISIBLE_DEVICES.",
            )
        )
    else:
        found.append(Finding(group, "GPUs", "none", Status.NOTE))
    if not facts["built_with_cuda"]:
        value, state = "not in this TensorFlow (built for CPUs)", Status.NOTE
    elif len(gpus) < 2:
        value, state = "in TensorFlow; needs two GPUs", Status.NOTE
    else:
        value, state = f"in TensorFlow, for {len(gpus)} GPUs", Status.OK
    return [*found, Finding(group, "NCCL", value, state)]


def engines(facts: dict[str, Any], horovod: Found | None) -> list[Finding]:
    """The engines that connect devices and processes."""
    group = "Engines"
    works = "error" not in facts and "keras_error" not in facts
    works = works and "compat_error" not in facts
    found = [
        Finding(
            group,
            "TowerStrategy",
            "in this package" if works else "see the problems above",
            Status.OK if works else Status.NOTE,
        )
    ]
    if "distribution" in facts:
        found.append(_distribution(facts["distribution"]))
    if horovod is None:
        advice = f"For several processes or machines: {INSTALL_HOROVOD}."
        return [
            *found,
            Finding(group, "Horovod", "not installed", Status.NOTE, advice),
        ]
    running = facts.get("tensorflow")
    value = f"{horovod.version} for TensorFlow {horovod.tensorflow or '?'}"
    if not horovod.loads:
        return [
            *found,
            Finding(
                group,
                "Horovod",
                f"{value}; does not load: {horovod.error}",
                Status.BAD,
                f"Build Horovod for this TensorFlow: {INSTALL_HOROVOD}.",
            ),
        ]
    value += f"; built in: {horovod.built_in}"
    if running and horovod.tensorflow not in (None, running):
        advice = f"Build Horovod for TensorFlow {running}: {INSTALL_HOROVOD}."
        found.append(Finding(group, "Horovod", value, Status.WARNING, advice))
    elif facts.get("gpus") and not horovod.parts.get("NCCL"):
        advice = (
            "Horovod was built without NCCL and sums on the host; to sum on "
            f"the GPUs: {INSTALL_HOROVOD} --with-nccl."
        )
        found.append(Finding(group, "Horovod", value, Status.WARNING, advice))
    else:
        found.append(Finding(group, "Horovod", value))
    return found


def _distribution(connected: bool) -> Finding:
    if connected:
        value = "DataParallel trains on towers, after `import keras_towers`"
        return Finding("Engines", "keras.distribution", value)
    return Finding(
        "Engines",
        "keras.distribution",
        "not connected: it trains on one device",
        Status.WARNING,
        "Use keras_towers.TowerStrategy instead of keras.distribution, or "
        "install a Keras that is known to work.",
    )


def build_tools(needed: bool) -> list[Finding]:
    """The tools for compiling engines.

    Args:
        needed: whether an engine still has to be built.
    """
    group = "To build engines"
    found = []
    for tool in (toolchain.find_compiler(), toolchain.find_make()):
        if tool.path:
            found.append(Finding(group, tool.name, tool.version))
            continue
        state = Status.WARNING if needed else Status.NOTE
        advice = f"To build Horovod: {tool.problem}." if needed else ""
        found.append(Finding(group, tool.name, "missing", state, advice))
    cmake = toolchain.find_cmake(Horovod.prefix)
    brought = "missing or too old; the build installs its own"
    found.append(
        Finding(group, "CMake", cmake.version if cmake.path else brought)
    )
    for tool in (
        toolchain.find_mpi(),
        nvidia.find_nvcc(Horovod.prefix),
        nvidia.find_nccl(Horovod.prefix),
    ):
        value = tool.version or tool.path or "none (optional)"
        state = Status.OK if tool.path else Status.NOTE
        found.append(Finding(group, tool.name, value, state))
    return found


def known_versions(text: str) -> dict[str, tuple[str, str]]:
    """Parse ``compat.KNOWN_TO_WORK``: the first and last version of each.

    Example:
        >>> known_versions("TensorFlow 2.20 and 2.21 with Keras 3.14 and 3.15")
        {'TensorFlow': ('2.20', '2.21'), 'Keras': ('3.14', '3.15')}
    """
    pattern = r"(TensorFlow|Keras) (\d+\.\d+) (?:and|to) (\d+\.\d+)"
    return {
        name: (first, last) for name, first, last in re.findall(pattern, text)
    }


def _side_by_side(name: str, packages: dict[str, str]) -> Finding:
    """Packages that contain the same module, of which one is enough."""
    names = list(packages)
    kept = name.lower() if name.lower() in names else names[0]
    advice = (
        f"{' and '.join(names)} overwrite each other's files. Keep one of "
        f"them, here {kept}, which other packages may require: pip uninstall "
        f"-y {' '.join(names)}; pip install {kept}=={packages[kept]}."
    )
    value = ", ".join(f"{item} {packages[item]}" for item in packages)
    return Finding("Versions", f"{name}, twice", value, Status.WARNING, advice)


def _library(
    name: str, facts: dict[str, Any], known: dict[str, tuple[str, str]]
) -> Finding:
    version = facts[name.lower()]
    packages = ", ".join(facts.get("packages", {}).get(name, ()))
    shown = f"{version} ({packages})" if packages else version
    if name not in known:
        return Finding("Versions", name, shown)
    first, last = known[name]
    if _minor(first) <= _minor(version) <= _minor(last):
        return Finding("Versions", name, shown)
    advice = f"{name} {version} is untested; {first} to {last} are tested."
    return Finding("Versions", name, shown, Status.WARNING, advice)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _python() -> Finding:
    version = platform.python_version()
    try:
        allowed = metadata.metadata("keras-towers")["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        allowed = ""
    least = re.search(r">=\s*([\d.]+)", allowed)
    below = re.search(r"<\s*([\d.]+)", allowed)
    if (least and _minor(version) < _minor(least.group(1))) or (
        below and _minor(version) >= _minor(below.group(1))
    ):
        advice = f"Create an environment with Python {allowed}."
        return Finding("Versions", "Python", version, Status.BAD, advice)
    return Finding("Versions", "Python", version)


def _own_version() -> str:
    try:
        return metadata.version("keras-towers")
    except metadata.PackageNotFoundError:
        return f"not installed, run from {os.getcwd()}"
