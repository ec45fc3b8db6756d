"""``keras-towers doctor``: what is installed, and what to do next."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keras_towers.bench.rows import ROWS
from keras_towers.bench.runner import Cell, Sample, Setting, run_cell, store
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
_MODEL, _RANKS = "small", 2
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.")
    ] = False,
) -> None:
    """Show whether what is installed works, and what to do next.

    The exit code is 1 if something required does not work or the self-test
    fails.
    """
    console = Console(highlight=False, quiet=as_json)
    with console.status("checking"):
        findings = check_all()
    _show(console, findings)
    if self_test:
        with console.status("training"):
            tested = _self_test(findings)
        _show(console, tested)
        findings += tested
    bad = any(finding.state is Status.BAD for finding in findings)
    _advise(console, findings)
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": not bad, "findings": listed}, indent=2))
    if bad:
        raise typer.Exit(1)


def _self_test(findings: list[Finding]) -> list[Finding]:
    """Run the self-test over what is installed, if all of that works."""
    if any(finding.state is Status.BAD for finding in findings):
        why = "not run: see the problems above"
        return [Finding("Self-test", "two processes", why, Status.NOTE)]
    missing = [f.name for f in findings if f.value == NOT_INSTALLED]
    return run_self_test([over for over in OVER if over not in missing])


def run_self_test(
    wanted: Sequence[str], timeout_s: float = 180
) -> list[Finding]:
    """Train alone and as jobs, and compare the losses."""
    setting = Setting("cpu", batch=16, steps=1, timeout_s=timeout_s)
    alone = Sample(Cell(_MODEL, "plain", 1, 0))
    findings = []
    with tempfile.TemporaryDirectory(prefix="keras-towers-") as folder:
        stored = Path(folder, "model")
        try:
            store(_MODEL, stored, setting)
            alone = run_cell(ROWS["plain"], alone.cell, setting, stored)
        except TowerError as error:
            alone.error = str(error)
        if alone.error:
            return [_tested("one process", "failed", alone.error)]
        for over in wanted:
            start, row = time.monotonic(), OVER[over]
            cell = Cell(_MODEL, row, _RANKS, 0)
            sample = run_cell(ROWS[row], cell, setting, stored)
            text, failure = compare_losses(alone, sample)
            text += f" ({time.monotonic() - start:.0f} s, on the CPU)"
            findings.append(_tested(f"over {over}", text, failure))
    return findings


def _tested(name: str, text: str, error: str) -> Finding:
    advice = f"The self-test {name} failed: {error}" if error else ""
    state = Status.BAD if error else Status.OK
    return Finding("Self-test", name, text, state, advice)


def compare_losses(alone: Sample, job: Sample) -> tuple[str, str]:
    """Compare a job's losses with those of one process.

    Returns:
        What was found, and why that is an error; empty: it is none.
    """
    if job.error:
        return f"a job of {_RANKS} processes failed", job.error
    losses = alone.result["losses"], job.result["losses"]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    text = f"largest difference of a loss to one process {difference:.1e}"
    # Written so that NaN fails.
    passed = difference <= _TOLERANCE
    return text, "" if passed else "its losses are not those of one process"


def _show(console: Console, findings: list[Finding]) -> None:
    for group, members in itertools.groupby(findings, lambda f: f.group):
        table = Table(
            title=group,
            title_justify="left",
            title_style="bold",
            box=None,
            show_header=False,
            padding=(0, 1),
        )
        table.add_column(width=1)
        # A fixed width, so that the columns of all tables line up.
        table.add_column(width=22)
        table.add_column(overflow="fold")
        for finding in members:
            table.add_row(_MARKS[finding.state], finding.name, finding.value)
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
