"""What has to be known of an engine to build it; each has a file of its own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from keras_towers.building.build_log import Hints
from keras_towers.building.toolchain import Tool
from keras_towers.subprocesses import NoAnswer, ask_python


class InstallError(Exception):
    """An engine cannot be installed: says why, and what to do."""


@dataclass(frozen=True)
class Found:
    """An installed engine.

    Attributes:
        version: of the package.
        tensorflow: the version it was built for, if it says so.
        loads: whether it can be imported with TensorFlow.
        error: why not.
        parts: what may be built in, and whether it is, for NCCL its version
            as a number: ``{"Gloo": True, "NCCL": 0}``.
    """

    version: str
    tensorflow: str | None
    loads: bool
    error: str = ""
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def built_in(self) -> str:
        """What is built in, for people: ``"Gloo, MPI"``."""
        return ", ".join(filter(self.parts.get, self.parts)) or "nothing"


class Recipe(ABC):
    """How one engine is built, with the options that were chosen.

    Attributes:
        name: of its package on PyPI.
        title: what people call it.
        version: the one that is built.
        sha256: of its source distribution.
        runtime: the packages that it imports, beside TensorFlow.
        probe: Python code that imports it, and prints ``Found.parts`` as JSON.
        hints: patterns of errors in its build log, and what to do about them.
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
        """What the machine has to have."""

    @abstractmethod
    def build_tools(self) -> list[str]:
        """What pip has to bring, as requirements."""

    @abstractmethod
    def key(self) -> dict[str, str]:
        """What its wheel depends on beside ``target.facts()``."""

    @abstractmethod
    def environment(
        self, variables: Mapping[str, str], folder: Path, tools: Path
    ) -> dict[str, str]:
        """The environment of the build.

        Args:
            variables: what it is for any engine.
            folder: where the recipe may put files that the build needs.
            tools: where ``build_tools`` are.
        """

    def built_for(self, package: metadata.Distribution) -> str | None:
        """The version of TensorFlow that an installed one was built for."""
        return None

    def look(self, timeout_s: float = 120) -> Found | None:
        """Look at the installed one, and load it in a fresh process.

        Returns:
            What is there, or None if it is not installed.
        """
        try:
            package = metadata.distribution(self.name)
        except metadata.PackageNotFoundError:
            return None
        tensorflow = self.built_for(package)
        try:
            parts = ask_python(
                # -P: a folder of its name where the user stands is not it.
                ["-P", "-c", self.probe],
                timeout_s,
                {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
        except NoAnswer as error:
            return Found(package.version, tensorflow, False, str(error))
        return Found(package.version, tensorflow, True, parts=parts)
