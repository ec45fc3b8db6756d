"""``keras-towers doctor``: what is installed, and what to do next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keras_towers.bench.rows import ROWS, Runs
from keras_towers.bench.runner import Setting, measure_all, plan
from keras_towers.doctor.checks import Finding, Status, check_all
from keras_towers.errors import TowerError

_MARKS = {
    Status.BAD: "[red]✗[/]",
    Status.WARNING: "[yellow]![/]",
    Status.NOTE: "[dim]–[/]",
    Status.OK: "[green]✓[/]",
}
# The strategies of the self-test, if they are installed.
_TESTED = ("multi-worker", "sync-replicas", "horovod")


def doctor(
    self_test: Annotated[bool, typer.Option("--self-test")] = False,
) -> None:
    """Show whether what is installed works, and what to do next.

    The exit code is 1 if something required does not work or the self-test
    fails.

    Args:
        self_test: Also train in two processes, over TensorFlow, parameter
            servers and Horovod, and compare the losses with one process's (one
            to three minutes).
    """
    console = Console(highlight=False)
    with console.status("checking"):
        findings = check_all()
    _show(console, findings)
    if self_test:
        tested = _self_test(console, findings)
        _show(console, tested)
        findings += tested
    _advise(console, findings)
    if _is_bad(findings):
        raise typer.Exit(1)


def _is_bad(findings: list[Finding]) -> bool:
    return any(finding.state is Status.BAD for finding in findings)


def _self_test(console: Console, findings: list[Finding]) -> list[Finding]:
    """Run the self-test with the installed engines, if all of them work."""
    if _is_bad(findings):
        why = "not run: see the problems above"
        return [Finding("Self-test", "two processes", why, Status.NOTE)]
    installed = [n for n in _TESTED if n in ROWS and not ROWS[n].missing]
    return run_self_test(console, installed)


def run_self_test(
    console: Console, names: Sequence[str], timeout_s: float = 180
) -> list[Finding]:
    """Train in one process and in several, and compare the losses."""
    rows = {name: ROWS[name] for name in ("plain", *names)}
    cells = plan(rows, ["small"], {Runs.ONE: [1], Runs.RANKS: [2]}, repeats=1)
    setting = Setting("cpu", 16, steps=1, timeout_s=timeout_s, exact=True)
    try:
        found = measure_all(cells, rows, setting, console)
    except TowerError as error:
        return [_report("plain", str(error))]
    if not found.complete:
        raise typer.Exit(130)
    return [_report(s.cell.row, s.error) for s in found.samples]


def _report(name: str, error: str) -> Finding:
    """Report the self-test's result for a strategy; no error means success."""
    if not error:
        return Finding("Self-test", name, "same losses as one process")
    advice = f"The self-test ({name}) failed: {error}"
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
