"""Rows with options, the plan of cells, and what becomes of them."""

import math

import pytest

from keras_towers.foundation import commands
from keras_towers.foundation.commands import CommandResult
from keras_towers.inspection.bench import runner
from keras_towers.inspection.bench.rows import ROWS, Runs, find_row
from keras_towers.inspection.bench.runner import (
    TOLERANCE,
    Cell,
    Setting,
    combine,
    difference,
)
from keras_towers.jobs.rendezvous import launchers
from tests.inspection.bench.shared import RANK


def test_options_behind_a_name_are_those_of_the_strategy():
    row = find_row(ROWS, "tower:mode=host:average=False")
    options = {"mode": "host", "average": False}
    assert row.train.keywords == {"name": "tower", "options": options}
    served = find_row(ROWS, "sync-replicas:ps=2")
    assert served.launcher(3) == ["--ps", "2", "--workers", "3"]
    assert served.train.keywords["options"] == {}
    assert find_row(ROWS, "horovod:towers=2:mode=host").towers == 2
    # Also in an allocation of several hosts.
    here, tasks = ["-H", "localhost:2"], ["--workers", "2"]
    assert find_row(ROWS, "multi-worker").launcher(2) == [*here, *tasks]
    byteps = ["-np", "2", *here, "--servers", "1"]
    assert find_row(ROWS, "byteps").launcher(2) == byteps


def test_rows_alternate_inside_every_repeat():
    names = ["plain", "tower", "horovod"]
    numbers = {Runs.ONE: [1], Runs.DEVICES: [1, 4], Runs.RANKS: [2]}
    rows = {name: ROWS[name] for name in names}
    order = ("plain", 1), ("tower", 1), ("horovod", 2), ("tower", 4)
    assert runner.plan_cells(rows, ["small"], numbers, 2) == [
        Cell("small", *row, repeat) for repeat in (0, 1) for row in order
    ]


def test_cell_without_a_result_fails_alone(monkeypatch, tmp_path):
    ended = CommandResult(0, "", "")
    monkeypatch.setattr(commands, "run_command", lambda *given, **more: ended)
    cell, setting = Cell("small", "tower", 2, 0), Setting("cpu", 64, 5, 120)
    sample = runner.run_cell(ROWS["tower"], cell, setting, tmp_path)
    assert sample.error == "a process wrote no result"


def test_ranks_are_put_together():
    first, second = (
        RANK | {"step_ms": n, "losses": [n, 4.0], "memory_mb": 100 * n}
        for n in (2.0, 4.0)
    )
    assert combine([first, second]) == {
        "step_ms": 3.0,
        # Of the global batch.
        "losses": [3.0, 4.0],
        "first_step_s": 1.5,
        "memory_mb": 600.0,
        # That of the process with most.
        "memory_to_state": 1.5,
    }


@pytest.mark.parametrize(
    ("losses", "reference", "said"),
    [
        ([2.5 * (1 + 0.9 * TOLERANCE)], [2.5], ""),
        ([2.5, 0.123], [2.5, 0.456], "step 2 on (0.123 against 0.456)"),
        ([math.nan], [1.0], "step 1 on (nan against 1)"),
        # A reference that has diverged is none.
        ([math.nan], [math.nan], "step 1 on (nan against nan)"),
        ([1.0], [], "plain Keras failed"),
    ],
)
def test_losses_are_those_of_plain_keras(losses, reference, said):
    found = difference(losses, reference)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_the_job_around_it_is_hidden(launcher, monkeypatch):
    """A benchmark may run in a pod, or as a process of torchrun."""
    for name in (launcher.rank_in, launcher.size_in, *launcher.needs):
        monkeypatch.setenv(name, "2")
    assert not launchers.detect().is_single_process
    assert launchers.detect(runner.environment({})).is_single_process
