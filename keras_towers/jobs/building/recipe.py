"""The recipe of an engine's build, and the machine that it is built for."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from keras_towers.foundation import import_hooks, settings, system
from keras_towers.foundation.commands import NoAnswer, ask_python
from keras_towers.jobs.building import toolchain
from keras_towers.jobs.building.toolchain import Tool


class InstallError(Exception):
    """An engine cannot be installed; the message says why and what to do."""


@dataclass(frozen=True)
class InstalledEngine:
    """An installed engine; ``parts`` as in ``{"Gloo": True, "NCCL": 0}``."""

    version: str
    tensorflow: str | None
    loads: bool
    error: str = ""
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def built_in(self) -> str:
        """The parts that are built in, such as ``"Gloo, MPI"``."""
        return ", ".join(filter(self.parts.get, self.parts)) or "nothing"


def put_first(
    variables: dict[str, str], name: str, values: Sequence[str]
) -> None:
    """Prepend folders to an environment variable, which may be unset."""
    kept = [variables[name]] if variables.get(name) else []
    if values:
        variables[name] = os.pathsep.join([*values, *kept])


_COMPILER_VARIABLES = (
    "CXX",
    "CPPFLAGS",
    "LDFLAGS",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
)


class Recipe(ABC):
    """The build of one engine, with the options that were chosen.

    Attributes:
        prefix: the prefix of the user's variables for it.
        purpose: what it is needed for, shown by the doctor.
        without_nccl: what it does without NCCL, shown by the doctor.
        for_one_cpu: whether its wheel may not run on another CPU.
        build_tools: the requirements of every build.
        runtime: the packages that it imports, besides TensorFlow.
        probe: Python code that imports it, and prints
            ``InstalledEngine.parts`` as JSON.
        revision: incremented when the build changes, for new wheels.
        build_variables: the user's variables that affect the build, besides the
            common variables of compilers.
        overruled: prefixes of variables that contradict the options.
    """

    prefix: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    purpose: ClassVar[str]
    without_nccl: ClassVar[str]
    for_one_cpu: ClassVar[bool] = False
    version: ClassVar[str]
    sha256: ClassVar[str]
    build_tools: ClassVar[tuple[str, ...]]
    runtime: ClassVar[tuple[str, ...]]
    probe: ClassVar[str]
    revision: ClassVar[int]
    build_variables: ClassVar[tuple[str, ...]]
    overruled: ClassVar[tuple[str, ...]]

    with_nccl: bool

    @abstractmethod
    def libraries(self) -> list[Tool]:
        """The compilers and libraries that the chosen options need."""

    @abstractmethod
    def processor(self) -> str:
        """The instruction sets that the wheel needs."""

    def packages(self) -> tuple[str, ...]:
        """The requirements that pip installs for the build."""
        return self.build_tools

    def tools(self) -> list[Tool]:
        """The tools that the machine must provide."""
        common = toolchain.find_compiler(), toolchain.find_make()
        return [*common, *self.libraries()]

    def key(self) -> dict[str, str]:
        """Facts that the wheel depends on besides ``target_facts()``."""
        variables = {
            name: os.environ[name]
            for name in (*_COMPILER_VARIABLES, *self.build_variables)
            if name in os.environ
        }
        return {
            "recipe": str(self.revision),
            self.name: self.version,
            "environment": json.dumps(variables, sort_keys=True),
            "processor": self.processor(),
            "options": str(self),
            **{t.name: f"{t.path} {t.version}" for t in self.libraries()},
        }

    @abstractmethod
    def environment(
        self, variables: dict[str, str], folder: Path, tools: Path
    ) -> dict[str, str]:
        """Complete the environment of a build."""

    def built_for(self, package: metadata.Distribution) -> str | None:
        """The TensorFlow version that an installed engine was built for."""
        return None

    def find_installed(self) -> InstalledEngine | None:
        """Load the engine in a fresh process; None if it is not installed."""
        try:
            package = metadata.distribution(self.name)
        except metadata.PackageNotFoundError:
            return None
        tensorflow = self.built_for(package)
        try:
            parts = ask_python(
                # -P: ignore a folder of that name in the current directory.
                ["-P", "-c", self.probe],
                settings.IMPORT_S,
                os.environ
                | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
            )
        except NoAnswer as error:
            return InstalledEngine(
                package.version, tensorflow, False, str(error)
            )
        return InstalledEngine(package.version, tensorflow, True, parts=parts)


_CPU_MODEL = ("vendor_id", "cpu family", "model", "stepping")


@functools.cache
def target_facts() -> dict[str, str]:
    """Facts that the wheels of all engines depend on."""
    library = tensorflow_folder() / "libtensorflow_framework.so.2"
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    packages = sorted(import_hooks.packages("tensorflow").items())
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
    flags = system.cpu().get("flags", "").split()
    return [flag for flag in wanted if flag in flags]


def cpu_type() -> str:
    """The model and instruction sets of this CPU, as compilers see them."""
    known = system.cpu()
    model = [known.get(name, "") for name in _CPU_MODEL]
    sets = " ".join(sorted(known.get("flags", "").split()))
    return f"{' '.join(model)} {hashlib.sha256(sets.encode()).hexdigest()[:8]}"
