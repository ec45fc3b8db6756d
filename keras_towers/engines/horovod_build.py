"""Builds Horovod for the TensorFlow of this environment, and installs it.

Horovod is published as source only. Compiling takes minutes, so the wheel is
kept for every environment of this machine that it fits.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from keras_towers.engines import (
    build_log,
    horovod_probe,
    horovod_recipe,
    subprocesses,
    toolchain,
    wheel_cache,
)
from keras_towers.engines.toolchain import InstallError

VERSION = "0.28.1"
_SDIST_SHA256 = (
    "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
)
# Known to work together with Horovod's setup.py, which is of 2023.
_BUILD_TOOLS = ("setuptools>=70,<85", "wheel>=0.43,<1", "packaging>=23,<27")
_CMAKE = "cmake>=3.13,<5"
# What Horovod imports, from the install_requires of its setup.py.
_RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging")
Progress = Callable[[str, float | None], None]
"""Called with what is being done, and how much of it from 0 to 1 or None."""


@dataclass(frozen=True)
class Built:
    """A wheel of Horovod.

    Attributes:
        wheel: the file, in the cache.
        cached: whether it was there already.
        seconds: how long it took.
    """

    wheel: Path
    cached: bool
    seconds: float


def build(
    with_mpi: bool,
    with_nccl: bool,
    progress: Progress,
    rebuild: bool = False,
) -> Built:
    """Get a wheel of Horovod for this environment: from the cache, or built.

    Args:
        with_mpi: build MPI in, beside Gloo.
        with_nccl: build NCCL in, for GPUs.
        progress: is told what is being done.
        rebuild: do not use the cache.

    Raises:
        InstallError: something is missing here, or it does not compile.
    """
    start = time.monotonic()
    key = wheel_cache.key(VERSION, with_mpi, with_nccl)

    def done(wheel: Path, cached: bool) -> Built:
        return Built(wheel, cached, time.monotonic() - start)

    found = wheel_cache.find(key)
    if found and not rebuild:
        return done(found, cached=True)
    _check_tools(with_mpi, with_nccl)

    def waiting() -> None:
        progress("waiting for another build of the same wheel", None)

    with wheel_cache.lock(key, waiting):
        found = wheel_cache.find(key)
        if found and not rebuild:
            return done(found, cached=True)
        with tempfile.TemporaryDirectory(
            prefix="keras-towers-", ignore_cleanup_errors=True
        ) as folder:
            wheel = _compile(Path(folder), with_mpi, with_nccl, progress)
            return done(wheel_cache.store(wheel, key), cached=False)


def install(
    built: Built, with_mpi: bool, with_nccl: bool, progress: Progress
) -> tuple[Built, horovod_probe.Found]:
    """Install a wheel that ``build`` gave, and see that it loads.

    A wheel of the cache that does not load here is built anew, once.

    Returns:
        What was installed, and what is found of it.

    Raises:
        InstallError: pip failed, or what was built does not load.
    """
    while True:
        _install(built.wheel, progress)
        progress("loading it with TensorFlow", None)
        found = horovod_probe.look()
        if found is not None and found.loads:
            return built, found
        reason = found.error if found else "it is not there"
        if not built.cached:
            built.wheel.unlink(missing_ok=True)
            raise InstallError(
                "Horovod was built and installed but does not load: "
                f"{reason}\nDoes TensorFlow itself? keras-towers doctor says."
            )
        built = build(with_mpi, with_nccl, progress, rebuild=True)


def _install(wheel: Path, progress: Progress) -> None:
    """Install the wheel and what Horovod imports, and nothing else."""
    progress("installing", None)
    needed = []
    for package in _RUNTIME:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            needed.append(package)
    environment = dict(os.environ)
    if needed:
        _pip(["install", *needed], environment, "install")
    # In place of the same version too: that may be for another TensorFlow.
    replace = ["--no-deps", "--force-reinstall"]
    _pip(["install", *replace, str(wheel)], environment, "install")


def _check_tools(with_mpi: bool, with_nccl: bool) -> None:
    problems = toolchain.missing(with_mpi, with_nccl)
    if problems:
        raise InstallError(
            "Horovod is compiled on this machine, and for that is missing:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _compile(
    folder: Path, with_mpi: bool, with_nccl: bool, progress: Progress
) -> Path:
    """Build the wheel in an empty folder."""
    progress("getting build tools", None)
    environment = horovod_recipe.environment(folder, with_mpi, with_nccl)
    tools = folder / "tools"
    wanted = [*_BUILD_TOOLS]
    cmake = toolchain.find_cmake().path
    if cmake is None:
        wanted.append(_CMAKE)
        cmake = str(tools / "bin" / "cmake")
    # Into a folder of their own: the user's environment stays as it is.
    _pip(["install", "--target", str(tools), *wanted], environment, "tools")
    environment["PYTHONPATH"] = str(tools)
    environment["HOROVOD_CMAKE"] = cmake

    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"horovod=={VERSION} --hash=sha256:{_SDIST_SHA256}\n"
    )
    progress(f"getting Horovod {VERSION}", None)

    def on_line(line: str) -> None:
        share = build_log.progress_in(line)
        if share is not None:
            progress("compiling", share)

    wheels = folder / "wheels"
    _pip(
        [
            "wheel",
            "--verbose",
            # pip's own cache does not know what a wheel was built for.
            "--no-cache-dir",
            "--no-deps",
            "--no-build-isolation",
            "--use-pep517",
            "--no-binary=horovod",
            "--require-hashes",
            f"--requirement={requirements}",
            f"--wheel-dir={wheels}",
        ],
        environment,
        "build",
        on_line,
    )
    return next(wheels.glob("*.whl"))


def _pip(
    arguments: list[str],
    environment: dict[str, str],
    what: str,
    on_line: Callable[[str], None] = lambda line: None,
) -> None:
    """Run pip with its output in a log, which stays if it fails."""
    logs = wheel_cache.folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    log = logs / f"horovod-{what}-{stamp}-{os.getpid()}.log"
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        status = subprocesses.run_logged(command, environment, log, on_line)
    except BaseException:
        with contextlib.suppress(OSError):
            log.unlink()
        raise
    if status:
        raise InstallError(_why(what, log, environment.get("TMPDIR")))
    log.unlink()


def _why(what: str, log: Path, temporary: str | None) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = build_log.errors_in(lines)
    hint = build_log.hint_for(errors)
    if temporary:
        # Long, gone already, and of no help.
        errors = [line.replace(f"{temporary}/", "") for line in errors]
    failed = {
        "tools": "The build tools could not be installed",
        "build": f"Horovod {VERSION} could not be built",
        "install": "pip could not install",
    }[what]
    told = [f"{failed}. The first errors:", *(f"  {line}" for line in errors)]
    if hint:
        told.append(hint)
    return "\n".join([*told, f"The whole log: {log}"])
