"""``keras-towers doctor``: what is installed, and what to do next."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keras_towers.doctor.checks import (
    NOT_INSTALLED,
    Finding,
    Status,
    check_all,
)

_MARKS = {
    Status.BAD: "[red]✗[/]",
    Status.WARNING: "[yellow]![/]",
    Status.NOTE: "[dim]–[/]",
    Status.OK: "[green]✓[/]",
}


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
    from keras_towers.bench import self_test

    if any(finding.state is Status.BAD for finding in findings):
        why = "not run: see the problems above"
        return [Finding("Self-test", "two processes", why, Status.NOTE)]
    missing = [f.name for f in findings if f.value == NOT_INSTALLED]
    return self_test.run([o for o in self_test.OVER if o not in missing])


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
