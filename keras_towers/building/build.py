"""Builds an engine for the TensorFlow of this environment, and installs it.

Compiling takes minutes, so wheels are cached for all compatible environments.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import filelock
import platformdirs

from keras_towers import settings, subprocesses
from keras_towers.building import toolchain
from keras_towers.building.recipe import (
    InstalledEngine,
    InstallError,
    Recipe,
    target_facts,
)
from keras_towers.system import writable

Progress = Callable[[str, float | None], None]
"""Called with the current task and its progress, from 0 to 1 or None."""


def build(
    recipe: Recipe, progress: Progress, rebuild: bool = False
) -> tuple[Path, bool]:
    """Build a wheel for this environment; or find it in the cache: True."""
    cache = cache_folder(recipe)
    found = _cached(cache)
    if found and not rebuild:
        return found, True
    problems = toolchain.problems(recipe.tools())
    if problems:
        raise InstallError(
            f"{recipe.title} has to be compiled on this machine, which "
            "lacks:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    with _locked(cache, progress):
        found = _cached(cache)
        if found and not rebuild:
            return found, True
        with tempfile.TemporaryDirectory(
            prefix="keras-towers-", ignore_cleanup_errors=True
        ) as build_folder:
            wheel = _compile(recipe, Path(build_folder), progress)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as new:
                # Whoever looks finds a whole wheel or none.
                copy = shutil.copy(wheel, new)
                return Path(shutil.move(copy, cache / wheel.name)), False


def install(
    recipe: Recipe, wheel: Path, cached: bool, progress: Progress
) -> tuple[bool, InstalledEngine]:
    """Install a wheel that loads: if a cached one does not, a new one."""
    while True:
        progress("installing", None)
        _install(recipe, wheel)
        progress("loading it with TensorFlow", None)
        found = recipe.find_installed()
        if found is not None and found.loads:
            return cached, found
        reason = found.error if found else "it is not installed"
        if not cached:
            wheel.unlink(missing_ok=True)
            raise InstallError(
                f"{recipe.title} was built and installed but does not load: "
                f"{reason}\nRun keras-towers doctor to check whether "
                "TensorFlow itself loads."
            )
        wheel, cached = build(recipe, progress, rebuild=True)


def environment(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Make the environment variables of a build from the user's."""
    temporary = folder / "tmp"
    temporary.mkdir()
    variables = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(recipe.overruled)
        },
        "PATH": toolchain.search_path(),
        # If pip is stopped, its files are removed with the folder.
        "TMPDIR": str(temporary),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CXX": toolchain.find_compiler().path or "",
    }
    if "MAKELEVEL" in variables:
        # Run by make: these flags are for its own jobs, not set by the user.
        for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
            variables.pop(name, None)
    # The default of an engine's setup.py can exceed the memory.
    variables.setdefault("MAKEFLAGS", f"-j{toolchain.jobs()}")
    return recipe.environment(variables, folder, _tools(folder))


def _tools(folder: Path) -> Path:
    return folder / "tools"


def _install(recipe: Recipe, wheel: Path) -> None:
    """Install the wheel and the packages it imports, and nothing else."""
    # Those that are there already, pip leaves as they are.
    _pip(recipe, ["install", *recipe.runtime], "install")
    # Reinstall even the same version: it may be for another TensorFlow.
    replace = ["--no-deps", "--force-reinstall"]
    _pip(recipe, ["install", *replace, str(wheel)], "install")


def _compile(recipe: Recipe, folder: Path, progress: Progress) -> Path:
    """Build the wheel in an empty folder."""
    progress("getting build tools", None)
    variables = environment(recipe, folder)
    tools = str(_tools(folder))
    # In a separate folder, to leave the user's environment alone.
    arguments = ["install", "--target", tools, *recipe.build_tools()]
    _pip(recipe, arguments, "tools", variables)
    variables["PYTHONPATH"] = tools

    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{recipe.name}=={recipe.version} --hash=sha256:{recipe.sha256}\n"
    )
    # Not every engine's build tells how far it has come.
    progress(f"getting and compiling {recipe.title} {recipe.version}", None)

    def on_line(line: str) -> None:
        share = progress_in(line)
        if share is not None:
            progress("compiling", share)

    wheels = folder / "wheels"
    arguments = [
        "wheel",
        "--verbose",
        # pip's own cache does not know for which TensorFlow a wheel is.
        "--no-cache-dir",
        "--no-deps",
        "--no-build-isolation",
        "--use-pep517",
        f"--no-binary={recipe.name}",
        "--require-hashes",
        f"--requirement={requirements}",
        f"--wheel-dir={wheels}",
    ]
    _pip(recipe, arguments, "build", variables, on_line)
    return next(wheels.glob("*.whl"))


def _pip(
    recipe: Recipe,
    arguments: list[str],
    what: str,
    variables: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> None:
    """Run pip with its output in a log, which is kept if it fails."""
    logs = make_folder(folder() / "logs")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    log = logs / f"{recipe.name}-{what}-{stamp}-{os.getpid()}.log"
    command = [sys.executable, "-m", "pip", *arguments]
    failed = False
    try:
        ended = subprocesses.run(
            command, settings.BUILD_S, variables, log=log, on_line=on_line
        )
        failed = ended.code != 0
    finally:
        if not failed:
            log.unlink(missing_ok=True)
    if failed:
        temporary = (variables or {}).get("TMPDIR")
        raise InstallError(_why(recipe, what, ended, log, temporary))


def _why(
    recipe: Recipe,
    what: str,
    ended: subprocesses.Ended,
    log: Path,
    temporary: str | None,
) -> str:
    errors = errors_in(ended.stdout.splitlines())
    hint = hint_for(errors, recipe.title)
    if temporary:
        # These long paths are deleted already, and of no help.
        errors = [line.replace(f"{temporary}/", "") for line in errors]
    failed = {
        "tools": "The build tools could not be installed",
        "build": f"{recipe.title} {recipe.version} could not be built",
        "install": "pip could not install",
    }[what]
    if ended.code is None:
        failed += f" in {settings.BUILD_S / 3600:.0f} hours"
    lines = [f"{failed}. The first errors:"]
    lines += [f"  {line}" for line in errors]
    if hint:
        lines.append(hint)
    return "\n".join([*lines, f"Full log: {log}"])


def folder() -> Path:
    """The folder of wheels and logs; ``settings.CACHE`` overrides it."""
    chosen = os.environ.get(settings.CACHE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("keras-towers", appauthor=False)


def make_folder(folder: Path) -> Path:
    """Make a folder of the cache, or raise ``UnusableFolder``."""
    return writable(folder, f"name another one in {settings.CACHE}")


def cache_folder(recipe: Recipe) -> Path:
    """The folder of one wheel, specific to its target and options."""
    key = json.dumps({**target_facts(), **recipe.key()}, sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return folder() / recipe.name / digest


def _cached(cache: Path) -> Path | None:
    return next(cache.glob("*.whl"), None)


@contextlib.contextmanager
def _locked(cache: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time build the wheel; the next finds it."""
    lock = filelock.FileLock(make_folder(cache) / ".lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        progress("waiting for another build of the same wheel", None)
        lock.acquire()
    except (OSError, NotImplementedError):
        pass  # Not all file systems have locks.
    try:
        yield
    finally:
        lock.release()  # Does nothing to a lock that is not held.


_SHOWN = 10
_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
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
# Patterns of errors that nothing is known of before, with advice for each.
_HINTS = (
    (
        r"unsupported GNU version|unsupported Microsoft|unsupported clang",
        "This CUDA does not support such a new compiler: set CXX to an older "
        "one.",
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
        r"is not able to compile a simple test program"
        r"|No CMAKE_CXX_COMPILER could be found",
        "The C++ compiler does not work: install one (Debian and Ubuntu: "
        "apt-get install g++), and check CXX, CXXFLAGS and LDFLAGS.",
    ),
    (
        r"Killed signal|internal compiler error: Killed|virtual memory",
        "The machine ran out of memory: set MAKEFLAGS=-j1 and try again.",
    ),
)


def progress_in(line: str) -> float | None:
    """The progress that a line of make reports, from 0 to 1."""
    found = _PERCENT.match(line)
    return int(found[1]) / 100 if found else None


def errors_in(lines: Iterable[str]) -> list[str]:
    """The first distinct lines of a log that report errors, else its end."""
    lines = [line.rstrip() for line in lines]
    found: dict[str, None] = {}
    for index, line in enumerate(lines):
        if not _ERROR.search(line) or _NOISE.search(line):
            continue
        text = line.strip()
        if "CMake Error" in text and text.endswith(":"):
            # CMake reports the place on one line and the error below it.
            below = filter(None, map(str.strip, lines[index + 1 :]))
            text = " ".join([text, *itertools.islice(below, 3)])
        found[text] = None
    return list(found)[:_SHOWN] or list(filter(None, lines))[-_SHOWN:]


def hint_for(lines: Iterable[str], title: str) -> str | None:
    """Advice for known errors of an engine's build, or None."""
    text = "\n".join(lines)
    for pattern, advice in _HINTS:
        if re.search(pattern, text):
            return advice.format(title=title)
    return None
