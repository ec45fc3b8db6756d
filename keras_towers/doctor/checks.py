"""The checks of ``keras-towers doctor``, and advice."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from keras_towers import __version__
from keras_towers.bench.rows import ROWS, Runs
from keras_towers.bench.runner import Setting, measure_all, plan_cells
from keras_towers.building.recipe import InstalledEngine, Recipe
from keras_towers.doctor import probe
from keras_towers.engines import ENGINES
from keras_towers.errors import TowerError
from keras_towers.system import usable_cores

_INSTALL_TENSORFLOW = (
    "install the extra keras-towers[cpu], or keras-towers[gpu] with NVIDIA "
    "GPUs (in a checkout: pip install '.[cpu]')"
)
# The strategies of the self-test, if they are installed.
_TESTED = ("multi-worker", "sync-replicas", "horovod")


class Status(Enum):
    """The severity of a finding, from the most severe on, and its mark."""

    BAD = "[red]✗[/]"
    # May not work; the advice says what to do.
    WARNING = "[yellow]![/]"
    # Something optional is missing.
    NOTE = "[dim]–[/]"
    OK = "[green]✓[/]"


@dataclass(frozen=True)
class Finding:
    """A line of the table ``group``, and advice, if any."""

    group: str
    name: str
    value: str
    state: Status = Status.OK
    advice: str = ""


def check_all() -> list[Finding]:
    """Run all checks that need no training."""
    recipes: list[Recipe] = [
        engine.load(engine.recipe)()
        for engine in ENGINES.values()
        if engine.recipe
    ]
    # Each check starts a process that imports TensorFlow.
    with ThreadPoolExecutor(2) as pool:
        facts_later = pool.submit(probe.tensorflow_state)
        engines_later = [
            pool.submit(recipe.find_installed) for recipe in recipes
        ]
        facts = facts_later.result()
        installed = [later.result() for later in engines_later]
    return [
        *version_findings(facts),
        *device_findings(facts),
        *engine_findings(facts, recipes, installed),
    ]


def version_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    """Check whether Python, TensorFlow and Keras are compatible."""
    finding = partial(Finding, "Versions")
    # pip has already compared Python's version with the requirement.
    yield finding("Python", platform.python_version())
    yield finding("keras-towers", __version__)
    for name, packages in facts.get("packages", {}).items():
        if len(packages) > 1:
            yield _side_by_side(name, packages)
    backend = facts.get("backend", "tensorflow")
    if backend != "tensorflow":
        advice = "Set KERAS_BACKEND=tensorflow (or change ~/.keras/keras.json)."
        yield finding("Keras's backend", backend, Status.BAD, advice)
    if "error" in facts:
        value = f"does not import: {facts['error']}"
        advice = f"Install a TensorFlow that works: {_INSTALL_TENSORFLOW}."
        yield finding("TensorFlow", value, Status.BAD, advice)
        return
    yield _library("TensorFlow", facts)
    if "keras_error" not in facts:
        yield _library("Keras", facts)
    elif backend == "tensorflow":
        value = f"does not import: {facts['keras_error']}"
        advice = "Install Keras 3: pip install --upgrade keras."
        yield finding("Keras", value, Status.BAD, advice)
    if "compat_error" in facts:
        value = "does not work with these versions"
        yield finding("keras_towers", value, Status.BAD, facts["compat_error"])


def device_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    """Check which devices are available for training."""
    finding = partial(Finding, "Devices")
    yield finding("CPU cores", str(usable_cores()))
    if "gpus" not in facts:
        return
    gpus = facts["gpus"]
    if gpus:
        kinds = {name: gpus.count(name) for name in gpus}
        value = ", ".join(f"{n} x {name}" for name, n in kinds.items())
        yield finding("GPUs", value)
    elif Path("/dev/nvidia0").exists():
        value = "present, but not visible to TensorFlow"
        advice = (
            "To train on the GPU: pip uninstall tensorflow-cpu; pip install "
            "'keras-towers[gpu]'; then check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES."
        )
        yield finding("GPUs", value, Status.WARNING, advice)
    else:
        yield finding("GPUs", "none", Status.NOTE)
    if facts["built_with_cuda"]:
        yield finding("NCCL", "in TensorFlow")
    else:
        value = "not in this TensorFlow (built for CPUs)"
        yield finding("NCCL", value, Status.NOTE)


def engine_findings(
    facts: dict[str, Any],
    recipes: Iterable[Recipe],
    installed: Iterable[InstalledEngine | None],
) -> Iterator[Finding]:
    """Check the engines that connect devices and processes."""
    finding = partial(Finding, "Engines")
    if facts.keys() & {"error", "keras_error", "compat_error"}:
        yield finding("TowerStrategy", "see the problems above", Status.NOTE)
    else:
        yield finding("TowerStrategy", "in this package")
    for recipe, engine in zip(recipes, installed, strict=True):
        yield finding(recipe.title, *_engine(recipe, engine, facts))


def _engine(
    recipe: Recipe, engine: InstalledEngine | None, facts: dict[str, Any]
) -> tuple[str, Status, str]:
    """Return the value, the severity and the advice of an engine."""
    name, install = recipe.title, f"keras-towers install {recipe.name}"
    again = f"{install} --rebuild" if recipe.for_one_cpu else install
    if engine is None:
        return "not installed", Status.NOTE, f"{recipe.purpose}: {install}."
    running, value = facts.get("tensorflow"), engine.version
    if engine.tensorflow:
        value += f" for TensorFlow {engine.tensorflow}"
    if not engine.loads:
        advice = f"Build {name} for this TensorFlow and this machine: {again}."
        return f"{value}; does not load: {engine.error}", Status.BAD, advice
    value += f"; built in: {engine.built_in}"
    if running and engine.tensorflow and engine.tensorflow != running:
        advice = f"Build {name} for TensorFlow {running}: {again}."
        return value, Status.WARNING, advice
    if facts.get("gpus") and not engine.parts.get("NCCL"):
        advice = (
            f"{name} was built without NCCL and {recipe.without_nccl}: "
            f"{install} --with-nccl."
        )
        return value, Status.WARNING, advice
    return value, Status.OK, ""


def _side_by_side(name: str, packages: dict[str, str]) -> Finding:
    """Report packages that contain the same module."""
    names = list(packages)
    kept = name.lower() if name.lower() in names else names[0]
    advice = (
        f"{' and '.join(names)} overwrite each other's files. Keep one of "
        f"them, here {kept}, which other packages may require: pip uninstall "
        f"-y {' '.join(names)}; pip install {kept}=={packages[kept]}."
    )
    value = ", ".join(f"{item} {packages[item]}" for item in packages)
    return Finding("Versions", f"{name}, twice", value, Status.WARNING, advice)


def _library(name: str, facts: dict[str, Any]) -> Finding:
    """Compare a library's version with the tested ones."""
    version = facts[name.lower()]
    packages = ", ".join(facts.get("packages", {}).get(name, ()))
    shown = f"{version} ({packages})" if packages else version
    tested = facts.get("tested_versions", {})
    first, last = tested.get(name, (version, version))
    if _minor(first) <= _minor(version) <= _minor(last):
        return Finding("Versions", name, shown)
    advice = f"{name} {version} is untested; {first} to {last} are tested."
    return Finding("Versions", name, shown, Status.WARNING, advice)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def run_self_test(
    console: Console, names: Sequence[str] = _TESTED, timeout_s: float = 180
) -> list[Finding] | None:
    """Train in one process and in several, and compare the losses.

    Strategies that are not installed are left out. None: Ctrl-C ended it.
    """
    installed = [n for n in names if n in ROWS and not ROWS[n].missing]
    rows = {name: ROWS[name] for name in ("plain", *installed)}
    cells = plan_cells(
        rows, ["small"], {Runs.ONE: [1], Runs.RANKS: [2]}, repeats=1
    )
    setting = Setting("cpu", 16, steps=1, timeout_s=timeout_s, exact=True)
    try:
        found = measure_all(cells, rows, setting, console)
    except TowerError as error:
        return [_tested("plain", str(error))]
    if not found.complete:
        return None
    return [_tested(sample.cell.row, sample.error) for sample in found.samples]


def _tested(name: str, error: str) -> Finding:
    """Report the self-test's result for a strategy; no error means success."""
    if not error:
        return Finding("Self-test", name, "same losses as one process")
    advice = f"The self-test ({name}) failed: {error}"
    return Finding("Self-test", name, "failed", Status.BAD, advice)
