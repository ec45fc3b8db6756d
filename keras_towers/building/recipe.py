"""What is needed to build an engine; each engine has its own file."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from keras_towers.building.build_log import Hints
from keras_towers.building.toolchain import Tool
from keras_towers.subprocesses import NoAnswer, ask_python


class InstallError(Exception):
    """An engine cannot be installed; the message says why and what to do."""


@dataclass(frozen=True)
class Found:
    """An installed engine.

    Attributes:
        version: the version of the package.
        tensorflow: the TensorFlow version it was built for, if recorded.
        loads: whether it can be imported with TensorFlow.
        error: why it cannot be imported.
        parts: optional parts, and whether each is built in; for NCCL its
            version as a number: ``{"Gloo": True, "NCCL": 0}``.
    """

    version: str
    tensorflow: str | None
    loads: bool
    error: str = ""
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def built_in(self) -> str:
        """The parts that are built in, such as ``"Gloo, MPI"``."""
        return ", ".join(filter(self.parts.get, self.parts)) or "nothing"


def chosen(names: Sequence[str]) -> str:
    """What the user has set of some environment variables, as JSON."""
    found = {name: os.environ[name] for name in names if name in os.environ}
    return json.dumps(found, sort_keys=True)


def without(
    variables: Mapping[str, str], prefixes: tuple[str, ...]
) -> dict[str, str]:
    """The environment variables that begin with none of some prefixes."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(prefixes)
    }


def put_first(
    variables: dict[str, str], name: str, values: Sequence[str]
) -> None:
    """Put folders before those of an environment variable, if any."""
    kept = [variables[name]] if variables.get(name) else []
    if values:
        variables[name] = os.pathsep.join([*values, *kept])


class Recipe(ABC):
    """How one engine is built, with the options that were chosen.

    Attributes:
        name: the name of its package on PyPI.
        title: its display name.
        version: the version to build.
        sha256: the hash of its source distribution.
        runtime: the packages it imports, besides TensorFlow.
        probe: Python code that imports it, and prints ``Found.parts`` as JSON.
        hints: patterns of errors in its build log, with advice.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]
    sha256: ClassVar[str]
    runtime: ClassVar[tuple[str, ...]]
    probe: ClassVar[str]
    hints: ClassVar[Hints] = ()

    @abstractmethod
    def tools(self) -> list[Tool]:
        """The tools that the machine must provide."""

    @abstractmethod
    def build_tools(self) -> list[str]:
        """The requirements that pip installs for the build."""

    @abstractmethod
    def key(self) -> dict[str, str]:
        """What its wheel depends on besides ``target.facts()``."""

    @abstractmethod
    def environment(
        self, variables: Mapping[str, str], folder: Path, tools: Path
    ) -> dict[str, str]:
        """The environment of the build.

        Args:
            variables: the environment common to all engines.
            folder: a folder for files that the build needs.
            tools: the folder of ``build_tools``.
        """

    def built_for(self, package: metadata.Distribution) -> str | None:
        """The TensorFlow version that an installed engine was built for."""
        return None

    def look(self, timeout_s: float = 120) -> Found | None:
        """Inspect the installed engine, and load it in a fresh process.

        Returns:
            What was found, or None if it is not installed.
        """
        try:
            package = metadata.distribution(self.name)
        except metadata.PackageNotFoundError:
            return None
        tensorflow = self.built_for(package)
        try:
            parts = ask_python(
                # -P: ignore a folder of that name in the current directory.
                ["-P", "-c", self.probe],
                timeout_s,
                {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
        except NoAnswer as error:
            return Found(package.version, tensorflow, False, str(error))
        return Found(package.version, tensorflow, True, parts=parts)
