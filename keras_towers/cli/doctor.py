"""``keras-towers doctor``: what is installed, and what to do next."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keras_towers import __version__
from keras_towers.cli.installed import tensorflow_state
from keras_towers.foundation import import_hooks, settings
from keras_towers.foundation.commands import NoAnswer, ask_python
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import JsonObject
from keras_towers.foundation.system import usable_cores
from keras_towers.inspection.bench.rows import ROWS, Runs
from keras_towers.inspection.bench.runner import (
    Setting,
    measure_all,
    plan_cells,
)
from keras_towers.jobs.building.recipe import InstalledEngine, Recipe
from keras_towers.jobs.known_engines import ENGINES

_INSTALL_TENSORFLOW = (
    "install the extra keras-towers[cpu], or keras-towers[gpu] with NVIDIA "
    "GPUs (in a checkout: pip install '.[cpu]')"
)
# Which processes run scripts written for Horovod as they are.
_UNMODIFIED = (
    "is keras_towers.horovod under `keras-towers run`, by `python -m "
    "keras_towers train.py`, and after `import keras_towers`"
)
# The strategies of the self-test, if they are installed.
_TESTED = ("multi-worker", "sync-replicas", "horovod")


def doctor(
    self_test: Annotated[bool, typer.Option("--self-test")] = False,
) -> None:
    """Check this installation, and show what to do next.

    If something required does not work, or the self-test fails, the exit code
    is 1.

    Args:
        self_test: Also test NCCL on all GPUs, and train in two processes over
            TensorFlow, parameter servers and Horovod (one to three minutes).
    """
    console = Console(highlight=False)
    with console.status("checking"):
        groups = check_all()
    for title, group in groups.items():
        _show(console, title, group)
    findings = [finding for group in groups.values() for finding in group]
    if self_test:
        why = "not run: see the problems above"
        tested = (
            [Finding("two processes", why, Status.NOTE)]
            if is_bad(findings)
            else run_self_test(console)
        )
        if tested is None:
            raise typer.Exit(130)
        if not is_bad(findings):
            tested = [try_nccl(), *tested]
        _show(console, "Self-test", tested)
        findings += tested
    # The most severe problems first.
    ranked = (f for status in Status for f in findings if f.status is status)
    advice = dict.fromkeys(f.advice for f in ranked if f.advice)
    if advice:
        console.print("What to do next", style="bold")
        for line in advice:
            console.print(f"  - {line}", markup=False, soft_wrap=True)
    else:
        console.print("No problems found.")
    if is_bad(findings):
        raise typer.Exit(1)


def _show(console: Console, title: str, findings: Sequence[Finding]) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    # A fixed width, so that the columns of all tables line up.
    table.add_column(width=22)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.status.value, finding.name, finding.value)
    console.print(title, style="bold")
    console.print(table)
    console.print()


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
    """A line of a table, and advice, if any."""

    name: str
    value: str
    status: Status = Status.OK
    advice: str = ""


def is_bad(findings: Sequence[Finding]) -> bool:
    """Whether something required does not work."""
    return any(finding.status is Status.BAD for finding in findings)


def check_all() -> dict[str, list[Finding]]:
    """Run all checks that need no training; the findings by their titles."""
    recipes: list[Recipe] = [
        engine.load(engine.recipe)()
        for engine in ENGINES.values()
        if engine.recipe
    ]
    # Each check starts a process that imports TensorFlow.
    with ThreadPoolExecutor(2) as pool:
        facts_later = pool.submit(tensorflow_state)
        installed = pool.map(lambda recipe: recipe.find_installed(), recipes)
        facts = facts_later.result()
        engines = [
            _judge_engine(recipe, engine, facts)
            for recipe, engine in zip(recipes, installed, strict=True)
        ]
    tower = Finding("TowerStrategy", "in this package")
    if facts.keys() & {"error", "keras_error", "compat_error"}:
        tower = Finding("TowerStrategy", "see the problems above", Status.NOTE)
    return {
        "Versions": [*_versions(facts)],
        "Devices": [*_devices(facts)],
        "Engines": [tower, *engines, Finding("horovod.keras", _UNMODIFIED)],
    }


def _versions(facts: JsonObject) -> Iterator[Finding]:
    """Check whether Python, TensorFlow and Keras are compatible."""
    # pip has already compared Python's version with the requirement.
    yield Finding("Python", platform.python_version())
    yield Finding("keras-towers", __version__)
    for name, packages in facts.get("packages", {}).items():
        if len(packages) > 1:
            yield _side_by_side(name, packages)
    backend = facts.get("backend", "tensorflow")
    if backend != "tensorflow":
        advice = "Set KERAS_BACKEND=tensorflow (or change ~/.keras/keras.json)."
        yield Finding("Keras's backend", backend, Status.BAD, advice)
    if "error" in facts:
        value = f"does not import: {facts['error']}"
        advice = f"Install a TensorFlow that works: {_INSTALL_TENSORFLOW}."
        yield Finding("TensorFlow", value, Status.BAD, advice)
        return
    yield _library("TensorFlow", facts)
    if "keras_error" not in facts:
        yield _library("Keras", facts)
    elif backend == "tensorflow":
        value = f"does not import: {facts['keras_error']}"
        advice = "Install Keras 3: pip install --upgrade keras."
        yield Finding("Keras", value, Status.BAD, advice)
    if "compat_error" in facts:
        value = "does not work with these versions"
        yield Finding("keras_towers", value, Status.BAD, facts["compat_error"])


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
    return Finding(f"{name}, twice", value, Status.WARNING, advice)


def _library(name: str, facts: JsonObject) -> Finding:
    """Compare a library's version with the tested ones."""
    version = facts[name.lower()]
    packages = ", ".join(facts.get("packages", {}).get(name, ()))
    shown = f"{version} ({packages})" if packages else version
    tested = facts.get("tested_versions", {})
    first, last = tested.get(name, (version, version))
    minor = import_hooks.minor_version
    if minor(first) <= minor(version) <= minor(last):
        return Finding(name, shown)
    advice = f"{name} {version} is untested; {first} to {last} are tested."
    return Finding(name, shown, Status.WARNING, advice)


def _devices(facts: JsonObject) -> Iterator[Finding]:
    """Check which devices are available for training."""
    yield Finding("CPU cores", str(usable_cores()))
    if "gpus" not in facts:
        return
    gpus = facts["gpus"]
    if gpus:
        kinds = {name: gpus.count(name) for name in gpus}
        value = ", ".join(f"{n} x {name}" for name, n in kinds.items())
        yield Finding("GPUs", value)
    elif Path("/dev/nvidia0").exists():
        value = "present, but not visible to TensorFlow"
        advice = (
            "To train on the GPU: pip uninstall tensorflow-cpu; pip install "
            "'keras-towers[gpu]'; then check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES."
        )
        yield Finding("GPUs", value, Status.WARNING, advice)
    else:
        yield Finding("GPUs", "none", Status.NOTE)
    if facts["built_with_cuda"]:
        value = "in TensorFlow"
        if len(gpus) > 1:
            value += "; --self-test tries it"
        yield Finding("NCCL", value)
    else:
        value = "not in this TensorFlow (built for CPUs)"
        yield Finding("NCCL", value, Status.NOTE)


def _judge_engine(
    recipe: Recipe, engine: InstalledEngine | None, facts: JsonObject
) -> Finding:
    """Judge an engine: what is installed, and whether it works here."""
    name, install = recipe.title, f"keras-towers install {recipe.name}"
    again = f"{install} --rebuild" if recipe.for_one_cpu else install
    if engine is None:
        advice = f"{recipe.purpose}: {install}."
        return Finding(name, "not installed", Status.NOTE, advice)
    running, value = facts.get("tensorflow"), engine.version
    if engine.tensorflow:
        value += f" for TensorFlow {engine.tensorflow}"
    if not engine.loads:
        advice = f"Build {name} for this TensorFlow and this machine: {again}."
        value += f"; does not load: {engine.error}"
        return Finding(name, value, Status.BAD, advice)
    value += f"; built in: {engine.built_in}"
    if running and engine.tensorflow and engine.tensorflow != running:
        advice = f"Build {name} for TensorFlow {running}: {again}."
        return Finding(name, value, Status.WARNING, advice)
    if facts.get("gpus") and not engine.parts.get("NCCL"):
        advice = (
            f"{name} was built without NCCL and {recipe.without_nccl}: "
            f"{install} --with-nccl."
        )
        return Finding(name, value, Status.WARNING, advice)
    return Finding(name, value)


def run_self_test(
    console: Console,
    names: Sequence[str] = _TESTED,
    timeout_s: float = settings.SELF_TEST_S,
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
        measurements = measure_all(cells, rows, setting, console)
    except TowerError as error:
        return [_tested("plain", str(error))]
    if not measurements.complete:
        return None
    return [
        _tested(sample.cell.row, sample.error)
        for sample in measurements.samples
    ]


def try_nccl() -> Finding:
    """Sum a small tensor over all GPUs, in a process of its own."""
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Something else may use them.
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    ask = "from keras_towers.cli.installed import nccl_state as s; print(s())"
    limit_s = settings.IMPORT_S + settings.NCCL_TIMEOUT_S
    try:
        state = ask_python(["-c", ask], limit_s, environment)
    except NoAnswer as error:
        state = {"obstacle": "", "failure": str(error), "version": ""}
    name = f"NCCL {state['version']}".strip()
    if state["obstacle"]:
        why = f"not tried: {state['obstacle']}"
        return Finding(name, why, Status.NOTE)
    if not state["failure"]:
        return Finding(name, "sums over all GPUs")
    advice = (
        f"NCCL does not sum over the GPUs ({state['failure']}), so strategies "
        'sum in mode "towers". To see why, set NCCL_DEBUG=INFO.'
    )
    return Finding(name, "does not sum", Status.WARNING, advice)


def _tested(name: str, error: str) -> Finding:
    """Report the self-test's result for a strategy; no error means success."""
    if not error:
        return Finding(name, "same losses as one process")
    advice = f"The self-test ({name}) failed: {error}"
    return Finding(name, "failed", Status.BAD, advice)
