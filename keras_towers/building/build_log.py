"""What a build's long log says: how far it is, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable

Hints = tuple[tuple[str, str], ...]
"""Patterns of errors, and what to do about each."""
_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
_STEPS = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_ERROR = re.compile(
    r"(?:^|\s)(?:fatal )?error: |CMake Error|undefined reference"
    r"|No space left on device|internal compiler error"
    r"|THESE PACKAGES DO NOT MATCH THE HASHES|No matching distribution"
    r"|cannot find -l|Killed signal",
)
# What only says that something inside has failed.
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
        "(TMPDIR names another).",
    ),
    (
        r"MATCH THE HASHES",
        "The package index gave a file other than the one that PyPI has.",
    ),
    (
        r"externally-managed-environment",
        "This Python belongs to the system: make an environment of your own "
        "(python3 -m venv) and install keras-towers there.",
    ),
    (
        r"No matching distribution|Could not find a version"
        r"|Failed to establish a new connection|NewConnectionError",
        "pip could not get a package: is the network there, and pip's index?",
    ),
)


def progress_in(line: str) -> float | None:
    """How much is compiled after this line of make or Ninja, from 0 to 1."""
    found = _PERCENT.match(line)
    if found:
        return min(int(found.group(1)), 100) / 100
    found = _STEPS.match(line)
    if found and int(found.group(2)):
        return min(int(found.group(1)) / int(found.group(2)), 1.0)
    return None


def errors_in(lines: Iterable[str], limit: int = 10) -> list[str]:
    """The first lines that say what went wrong, each once.

    Args:
        lines: the whole log.
        limit: how many at most.

    Returns:
        Lines of the compiler, the linker, CMake or pip; the log's end if none
        of them looks like an error.
    """
    lines = [line.rstrip() for line in lines]
    found: dict[str, None] = {}
    for index, line in enumerate(lines):
        if not _ERROR.search(line) or _NOISE.search(line):
            continue
        text = line.strip()
        if "CMake Error" in text and text.endswith(":"):
            # CMake says where on one line, and what on those below.
            text += " " + _paragraph(lines[index + 1 :])
        found[text] = None
        if len(found) == limit:
            break
    return list(found) or [line for line in lines if line.strip()][-limit:]


def hint_for(lines: Iterable[str], hints: Hints = ()) -> str | None:
    """What to do about the errors, where they are recognised.

    Args:
        lines: the errors.
        hints: patterns and advice of one engine, beside those of any build.
    """
    text = "\n".join(lines)
    for pattern, advice in (*hints, *_HINTS):
        if re.search(pattern, text):
            return advice
    return None


def _paragraph(lines: list[str]) -> str:
    """The first words of a message of CMake, which spreads it over lines."""
    words: list[str] = []
    for line in lines[:8]:
        text = line.strip()
        if text.startswith("Call Stack") or len(words) == 3:
            break
        if text:
            words.append(text)
    return " ".join(words)
