"""Reads a build log: its progress, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
_STEPS = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_ERROR = re.compile(
    r"(?:^|\s)(?:fatal )?error: |CMake Error|undefined reference"
    r"|No space left on device|internal compiler error"
    r"|THESE PACKAGES DO NOT MATCH THE HASHES|No matching distribution"
    r"|cannot find -l|Killed signal",
)
# Lines that only report that a subprocess failed.
_NOISE = re.compile(
    r"error: (?:subprocess-exited-with-error|metadata-generation-failed"
    r"|legacy-install-failure|command .* failed|ld returned)"
    r"|This error originates from"
)
# Patterns of errors, with advice for each.
_HINTS = (
    (
        r"nccl\.h|Could NOT find NCCL|-lnccl",
        "NCCL is missing: install it (Debian and Ubuntu: libnccl-dev from "
        "NVIDIA's repository), set {prefix}_NCCL_HOME to its folder, or build "
        "without --with-nccl.",
    ),
    (
        r"unsupported GNU version|unsupported Microsoft|unsupported clang",
        "This CUDA does not support such a new compiler: set CXX to an older "
        "one.",
    ),
    (
        r"Failed to find nvcc|CUDAToolkit|CMAKE_CUDA_COMPILER|cuda_runtime"
        r"|-lcudart|CUDA library was not found",
        "The CUDA toolkit is missing or unusable: set {prefix}_CUDA_HOME to "
        "its folder, or build without --with-nccl.",
    ),
    (
        r"rdma|ibverbs",
        "Headers of RDMA are installed, but not its libraries: install them "
        "(Debian and Ubuntu: librdmacm-dev), or remove the headers.",
    ),
    (
        r"tensorflow/\S+: No such file|xla/\S+: No such file|stream_executor",
        "This TensorFlow lacks a header or a name that {title} needs: the "
        "build is known to work with TensorFlow 2.20 and 2.21.",
    ),
    (
        r"mpi\.h|Could NOT find MPI",
        "MPI is missing: apt-get install libopenmpi-dev openmpi-bin, or build "
        "without --with-mpi.",
    ),
    (
        r"is not able to compile a simple test program"
        r"|No CMAKE_CXX_COMPILER could be found",
        "The C++ compiler does not work: install one (Debian and Ubuntu: "
        "apt-get install g++), and check CXX, CXXFLAGS and LDFLAGS.",
    ),
    (
        r"Killed signal|internal compiler error: Killed|virtual memory",
        "The machine ran out of memory: set MAKEFLAGS=-j1 and try again.",
    ),
    (
        r"No space left on device",
        "The disk is full: a build needs about 1 GB in the temporary folder "
        "(set TMPDIR to use another).",
    ),
    (
        r"MATCH THE HASHES",
        "The package index served a different file from the one on PyPI.",
    ),
    (
        r"externally-managed-environment",
        "This Python is managed by the system: create a virtual environment "
        "(python3 -m venv) and install keras-towers there.",
    ),
    (
        r"No matching distribution|Could not find a version"
        r"|Failed to establish a new connection|NewConnectionError",
        "pip could not get a package: check the network and pip's index.",
    ),
)


def progress_in(line: str) -> float | None:
    """The progress that a line of make or Ninja reports, from 0 to 1."""
    found = _PERCENT.match(line)
    if found:
        return min(int(found.group(1)), 100) / 100
    found = _STEPS.match(line)
    if found and int(found.group(2)):
        return min(int(found.group(1)) / int(found.group(2)), 1.0)
    return None


def errors_in(lines: Iterable[str], limit: int = 10) -> list[str]:
    """The first distinct lines of a log that report errors, else its end."""
    lines = [line.rstrip() for line in lines]
    found: dict[str, None] = {}
    for index, line in enumerate(lines):
        if not _ERROR.search(line) or _NOISE.search(line):
            continue
        text = line.strip()
        if "CMake Error" in text and text.endswith(":"):
            # CMake reports the place on one line and the error below it.
            text += " " + _paragraph(lines[index + 1 :])
        found[text] = None
        if len(found) == limit:
            break
    return list(found) or [line for line in lines if line.strip()][-limit:]


def hint_for(lines: Iterable[str], prefix: str, title: str) -> str | None:
    """Advice for known errors of an engine's build, or None."""
    text = "\n".join(lines)
    for pattern, advice in _HINTS:
        if re.search(pattern, text):
            return advice.format(prefix=prefix, title=title)
    return None


def _paragraph(lines: list[str]) -> str:
    """The start of a CMake message, which spans several lines."""
    words: list[str] = []
    for line in lines[:8]:
        text = line.strip()
        if text.startswith("Call Stack") or len(words) == 3:
            break
        if text:
            words.append(text)
    return " ".join(words)
