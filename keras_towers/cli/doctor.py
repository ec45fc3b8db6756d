"""``keras-towers doctor``: what is installed, and what to do next."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keras_towers.doctor.checks import Finding, Status, check_all, run_self_test


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
        why = "not run: see the problems above"
        tested = (
            [Finding("Self-test", "two processes", why, Status.NOTE)]
            if _is_bad(findings)
            else run_self_test(console)
        )
        if tested is None:
            raise typer.Exit(130)
        _show(console, tested)
        findings += tested
    _advise(console, findings)
    if _is_bad(findings):
        raise typer.Exit(1)


def _is_bad(findings: list[Finding]) -> bool:
    return any(finding.state is Status.BAD for finding in findings)


def _show(console: Console, findings: list[Finding]) -> None:
    for group, members in itertools.groupby(findings, lambda f: f.group):
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        # A fixed width, so that the columns of all tables line up.
        table.add_column(width=22)
        table.add_column(overflow="fold")
        for finding in members:
            table.add_row(finding.state.value, finding.name, finding.value)
        console.print(group, style="bold")
        console.print(table)
        console.print()


def _advise(console: Console, findings: list[Finding]) -> None:
    """Print what to do next, most severe problems first."""
    ranked = (f for state in Status for f in findings if f.state is state)
    advice = list(dict.fromkeys(f.advice for f in ranked if f.advice))
    if not advice:
        console.print("No problems found.")
        return
    console.print("What to do next", style="bold")
    for line in advice:
        console.print(f"  - {line}", markup=False, soft_wrap=True)
