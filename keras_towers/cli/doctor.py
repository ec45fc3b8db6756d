"""``keras-towers doctor``: what is installed, and what to do next."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keras_towers.bench.rows import ROWS
from keras_towers.bench.runner import Cell, Setting, run_cell, store
from keras_towers.doctor.checks import (
    NOT_INSTALLED,
    Finding,
    Status,
    check_all,
)
from keras_towers.errors import TowerError

_MARKS = {
    Status.BAD: "[red]✗[/]",
    Status.WARNING: "[yellow]![/]",
    Status.NOTE: "[dim]–[/]",
    Status.OK: "[green]✓[/]",
}
# The strategies that connect the processes, by what carries their tensors.
OVER = {
    name: strategy
    for name, strategy in (
        ("TensorFlow", "multi-worker"),
        ("parameter servers", "sync-replicas"),
        ("Horovod", "horovod"),
    )
    if strategy in ROWS
}
_MODEL, _PROCESSES = "small", 2
# Room for the effect of summation order on float32 losses.
_TOLERANCE = 1e-5


def doctor(
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Also train in two processes, over TensorFlow, parameter "
            "servers and Horovod, and compare the losses with those of one "
            "process (one to three minutes).",
        ),
    ] = False,
) -> None:
    """Show whether what is installed works, and what to do next.

    The exit code is 1 if something required does not work or the self-test
    fails.
    """
    console = Console(highlight=False)
    with console.status("checking"):
        findings = check_all()
    _show(console, findings)
    if self_test:
        with console.status("training"):
            tested = _self_test(findings)
        _show(console, tested)
        findings += tested
    _advise(console, findings)
    if _is_bad(findings):
        raise typer.Exit(1)


def _is_bad(findings: list[Finding]) -> bool:
    return any(finding.state is Status.BAD for finding in findings)


def _self_test(findings: list[Finding]) -> list[Finding]:
    """Run the self-test over what is installed, if all of that works."""
    if _is_bad(findings):
        why = "not run: see the problems above"
        return [Finding("Self-test", "two processes", why, Status.NOTE)]
    missing = [f.name for f in findings if f.value == NOT_INSTALLED]
    return run_self_test([over for over in OVER if over not in missing])


def run_self_test(
    wanted: Sequence[str], timeout_s: float = 180
) -> list[Finding]:
    """Train in one process and in several, and compare the losses."""
    setting = Setting("cpu", batch=16, steps=1, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="keras-towers-") as folder:
        stored = Path(folder, "model")

        def train(row: str, processes: int) -> list[float]:
            cell = Cell(_MODEL, row, processes, 0)
            sample = run_cell(ROWS[row], cell, setting, stored)
            if sample.error:
                raise TowerError(sample.error)
            losses: list[float] = sample.result["losses"]
            return losses

        try:
            store(_MODEL, stored, setting)
            alone = train("plain", 1)
        except TowerError as error:
            return [_failed("one process", str(error))]
        found = []
        for over in wanted:
            try:
                losses = train(OVER[over], _PROCESSES)
                found.append(compare_losses(over, alone, losses))
            except TowerError as error:
                found.append(_failed(over, str(error)))
        return found


def compare_losses(
    over: str, alone: Sequence[float], together: Sequence[float]
) -> Finding:
    """Compare the losses of several processes with those of one."""
    pairs = zip(alone, together, strict=True)
    difference = max(abs(one - other) for one, other in pairs)
    text = f"largest difference of a loss to one process {difference:.1e}"
    # Written so that NaN fails.
    if not difference <= _TOLERANCE:
        return _failed(over, text)
    return Finding("Self-test", over, text)


def _failed(name: str, why: str) -> Finding:
    advice = f"The self-test ({name}) failed: {why}"
    return Finding("Self-test", name, "failed", Status.BAD, advice)


def _show(console: Console, findings: list[Finding]) -> None:
    for group, members in itertools.groupby(findings, lambda f: f.group):
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        # A fixed width, so that the columns of all tables line up.
        table.add_column(width=22)
        table.add_column(overflow="fold")
        for finding in members:
            table.add_row(_MARKS[finding.state], finding.name, finding.value)
        console.print(group, style="bold")
        console.print(table)
        console.print()


def _advise(console: Console, findings: list[Finding]) -> None:
    """Print what to do next, most severe problems first."""
    ranked = (f for state in _MARKS for f in findings if f.state is state)
    advice = list(dict.fromkeys(f.advice for f in ranked if f.advice))
    if not advice:
        console.print("No problems found.")
        return
    console.print("What to do next", style="bold")
    for line in advice:
        console.print(f"  - {line}", markup=False, soft_wrap=True)
