"""Reads a build log: its progress, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable

Hints = tuple[tuple[str, str], ...]
"""Patterns of errors, with advice for each."""
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
_HINTS: Hints = (
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


def hint_for(lines: Iterable[str], hints: Hints = ()) -> str | None:
    """Advice for known errors of one engine or of all, or None."""
    text = "\n".join(lines)
    for pattern, advice in (*hints, *_HINTS):
        if re.search(pattern, text):
            return advice
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
