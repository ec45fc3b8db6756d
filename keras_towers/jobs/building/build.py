"""Builds the wheel of an engine, and installs it.

An engine is built for the TensorFlow of this environment. Compiling takes
minutes, so wheels are cached for all compatible environments.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import filelock
import platformdirs

from keras_towers.foundation import commands, settings
from keras_towers.foundation.system import absolute, make_writable, replace_file
from keras_towers.jobs.building import toolchain
from keras_towers.jobs.building.recipe import (
    InstalledEngine,
    InstallError,
    Recipe,
    target_facts,
)

Progress = Callable[[str], None]
"""Called with a description of the current activity."""


def build_wheel(
    recipe: Recipe, progress: Progress, rebuild: bool = False
) -> tuple[Path, bool]:
    """Build a wheel, or find it in the cache; return whether it was found."""
    cache = cache_folder(recipe)
    with _lock(cache, progress):
        cached = next(cache.glob("*.whl"), None)
        if cached and not rebuild:
            return cached, True
        problems = toolchain.problems(recipe.tools())
        if problems:
            raise InstallError(
                f"{recipe.title} must be compiled on this machine, which "
                "lacks:\n" + "\n".join(f"  - {problem}" for problem in problems)
            )
        with tempfile.TemporaryDirectory(
            prefix="keras-towers-", ignore_cleanup_errors=True
        ) as build_folder:
            wheel = _compile(recipe, Path(build_folder), progress)
            # Even without a lock, other builds find a complete wheel or none.
            built = cache / wheel.name
            replace_file(built, lambda file: file.write(wheel.read_bytes()))
            return built, False


def install_wheel(
    recipe: Recipe, wheel: Path, cached: bool, progress: Progress
) -> tuple[bool, InstalledEngine]:
    """Install a wheel; if a cached one does not load, build a new one."""
    while True:
        progress("installing")
        _pip_install(recipe, wheel)
        progress("loading it with TensorFlow")
        installed = recipe.find_installed()
        if installed is not None and installed.loads:
            return cached, installed
        reason = installed.error if installed else "it is not installed"
        if not cached:
            wheel.unlink(missing_ok=True)
            raise InstallError(
                f"{recipe.title} was built and installed but does not load: "
                f"{reason}\nRun keras-towers doctor to check whether "
                "TensorFlow itself loads."
            )
        wheel, cached = build_wheel(recipe, progress, rebuild=True)


def build_environment(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Make the environment variables of a build from the user's."""
    temporary = folder / "tmp"
    temporary.mkdir()
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(recipe.overruled)
    }
    variables = own | {
        f"{recipe.prefix}_WITH_TENSORFLOW": "1",
        f"{recipe.prefix}_WITHOUT_PYTORCH": "1",
        f"{recipe.prefix}_WITHOUT_MXNET": "1",
        "PATH": toolchain.search_path(),
        # If pip is stopped, its files are removed with the folder.
        "TMPDIR": str(temporary),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CXX": toolchain.find_compiler().path or "",
    }
    if "MAKELEVEL" in variables:
        # Flags that make passes to its own jobs were not set by the user.
        for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
            variables.pop(name, None)
    # The default of an engine's setup.py can exceed the memory.
    variables.setdefault("MAKEFLAGS", f"-j{toolchain.jobs()}")
    return recipe.environment(variables, folder, folder / "tools")


def _pip_install(recipe: Recipe, wheel: Path) -> None:
    """Install the wheel and the packages it imports, and nothing else."""
    # Reinstall even the same version: it may be for another TensorFlow.
    replace = ["--no-deps", "--force-reinstall", str(wheel)]
    # pip leaves installed runtime packages as they are.
    for arguments in (recipe.runtime, replace):
        _pip(recipe, ["install", *arguments], "pip could not install it")


def _compile(recipe: Recipe, folder: Path, progress: Progress) -> Path:
    """Build the wheel in an empty folder."""
    progress("getting build tools")
    variables = build_environment(recipe, folder)
    tools = str(folder / "tools")
    # In a separate folder, to leave the user's environment alone.
    arguments = ["install", "--target", tools, *recipe.packages()]
    failure = "The build tools could not be installed"
    _pip(recipe, arguments, failure, variables)
    variables["PYTHONPATH"] = tools

    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{recipe.name}=={recipe.version} --hash=sha256:{recipe.sha256}\n"
    )
    progress(f"getting and compiling {recipe.title} {recipe.version}")
    wheels = folder / "wheels"
    arguments = [
        "wheel",
        "--verbose",
        # pip's own cache does not distinguish wheels by TensorFlow version.
        "--no-cache-dir",
        "--no-deps",
        "--no-build-isolation",
        "--use-pep517",
        f"--no-binary={recipe.name}",
        "--require-hashes",
        f"--requirement={requirements}",
        f"--wheel-dir={wheels}",
    ]
    failure = f"{recipe.title} {recipe.version} could not be built"
    _pip(recipe, arguments, failure, variables)
    return next(wheels.glob("*.whl"))


def _pip(
    recipe: Recipe,
    arguments: list[str],
    failure: str,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run pip with its output in a log, which is kept if it fails."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    logs = make_folder(cache_root() / "logs")
    log = logs / f"{recipe.name}-{stamp}-{os.getpid()}.log"
    command = [sys.executable, "-m", "pip", *arguments]
    with contextlib.ExitStack() as unless_kept:
        unless_kept.callback(log.unlink, missing_ok=True)
        ended = commands.run_command(
            command, settings.BUILD_S, variables, log=log
        )
        if ended.code == 0:
            return
        unless_kept.pop_all()
    errors = errors_in(ended.stdout.splitlines())
    if ended.code is None:
        failure += f" in {settings.BUILD_S / 3600:.0f} hours"
    if variables:
        # These long paths do not help: they are deleted already.
        deleted = f"{variables['TMPDIR']}/"
        errors = [line.replace(deleted, "") for line in errors]
    shown = "".join(f"  {line}\n" for line in errors)
    raise InstallError(f"{failure}. The first errors:\n{shown}Full log: {log}")


def cache_root() -> Path:
    """The folder of wheels and logs; ``settings.ENV_CACHE`` overrides it."""
    chosen = os.environ.get(settings.ENV_CACHE)
    if chosen:
        return absolute(Path(chosen).expanduser())
    return platformdirs.user_cache_path("keras-towers", appauthor=False)


def make_folder(folder: Path) -> Path:
    """Make a folder of the cache, or raise ``UnusableFolder``."""
    return make_writable(folder, f"name another one in {settings.ENV_CACHE}")


def cache_folder(recipe: Recipe) -> Path:
    """The folder of one wheel, specific to its target and options."""
    key = json.dumps({**target_facts(), **recipe.key()}, sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_root() / recipe.name / digest


@contextlib.contextmanager
def _lock(cache: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time build the wheel; the next one finds it."""
    lock = filelock.FileLock(make_folder(cache) / ".lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        progress("waiting for another build of the same wheel")
        lock.acquire()
    except (OSError, NotImplementedError):
        pass  # Not all file systems have locks.
    try:
        yield
    finally:
        lock.release()  # Does nothing to a lock that is not held.


_SHOWN = 10
_ERROR = re.compile(
    r"(?:^|\s)(?:fatal )?error: |CMake Error|undefined reference"
    r"|No space left on device|internal compiler error"
    r"|THESE PACKAGES DO NOT MATCH THE HASHES|No matching distribution"
    r"|cannot find -l|Killed signal"
)
# Lines that only report that a subprocess failed.
_NOISE = re.compile(
    r"error: (?:subprocess-exited-with-error|metadata-generation-failed"
    r"|legacy-install-failure|command .* failed|ld returned)"
    r"|This error originates from"
)


def errors_in(lines: Iterable[str]) -> list[str]:
    """The first distinct lines of a log that report errors, else its end."""
    lines = [line.rstrip() for line in lines]
    errors: dict[str, None] = {}
    for index, line in enumerate(lines):
        if not _ERROR.search(line) or _NOISE.search(line):
            continue
        text = line.strip()
        if "CMake Error" in text and text.endswith(":"):
            # CMake reports the place on one line and the error below it.
            below = filter(None, map(str.strip, lines[index + 1 :]))
            text = " ".join([text, *itertools.islice(below, 3)])
        errors[text] = None
    return list(errors)[:_SHOWN] or list(filter(None, lines))[-_SHOWN:]
