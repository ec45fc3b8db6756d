"""``keras-towers doctor``: what is installed, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keras_towers.doctor import (
    Finding,
    Status,
    check_all,
    is_bad,
    run_self_test,
    try_nccl,
)


def doctor(
    self_test: Annotated[bool, typer.Option("--self-test")] = False,
) -> None:
    """Show whether what is installed works, and what to do next.

    The exit code is 1 if something required does not work or the self-test
    fails.

    Args:
        self_test: Also train in two processes, over TensorFlow, parameter
            servers and Horovod, and compare the losses with one process's (one
            to three minutes), and sum over all GPUs with NCCL.
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
