"""Planning the cells, and processes that end badly."""

import pytest

from keras_towers.bench import runner
from keras_towers.bench.plan import Cell, Setting, plan_cells
from keras_towers.bench.rows import PROCESSES, TOWERS
from keras_towers.bench.runner import (
    Sample,
    WorkerFailed,
    combine,
    failed_before,
    run_cell,
)


@pytest.mark.parametrize(
    ("suite", "rows"),
    [(TOWERS, ["plain", "towers"]), (PROCESSES, ["compute", "strategy"])],
)
def test_rows_alternate_inside_every_repeat(suite, rows):
    cells = plan_cells(suite, ["small"], rows[::-1], [2, 4], 2, adoption=False)
    assert cells == [
        Cell(suite.kind, "small", row, count, repeat)
        for repeat in (0, 1)
        for count in (2, 4)
        for row in rows
    ]


def test_adoption_is_planned_once_and_only_for_ours():
    rows = ["plain", "towers"]
    cells = plan_cells(TOWERS, ["small"], rows, [2, 4], 3, adoption=True)
    adoption = [cell for cell in cells if cell.kind == "adoption"]
    assert [(cell.row, cell.replicas) for cell in adoption] == [
        ("towers", 2),
        ("towers", 4),
    ]


def test_title_says_what_the_replicas_are():
    titles = [
        Cell("training", "large", "towers", 1, 0).title,
        Cell("adoption", "adoption", "towers", 2, 0).title,
        Cell("processes", "large", "compute", 2, 0).title,
    ]
    assert titles == [
        "large, 1 tower, towers",
        "adoption, 2 towers, towers",
        "large, 2 processes, compute",
    ]


def test_worker_that_runs_too_long_is_ended():
    cell = Cell("training", "small", "plain", 2, 0)
    sample = run_cell(cell, Setting("cpu", 64, 5, timeout_s=0.05))
    assert sample.error == "no result after 0.05 seconds"


def test_worker_that_fails_leaves_its_last_words():
    cell = Cell("training", "small", "magic", 2, 0)
    sample = run_cell(cell, Setting("cpu", 64, 5, timeout_s=120))
    assert sample.result == {}
    assert sample.error.startswith("exit code 1\n")
    assert sample.error.endswith("KeyError: 'magic'")


def test_worker_that_leaves_nothing_has_failed(monkeypatch):
    monkeypatch.setattr(runner, "run_python", lambda *arguments: None)
    cell = Cell("processes", "small", "compute", 2, 0)
    sample = run_cell(cell, Setting("cpu", 64, 5, timeout_s=120))
    assert sample.error == "a process wrote no result"


def test_cell_that_cannot_be_compared_loses_only_itself(monkeypatch):
    def broken(cell, setting):
        return [[1.0]] - [[1.0]]

    monkeypatch.setattr(runner, "_run_cell", broken)
    cell = Cell("processes", "small", "compute", 2, 0)
    sample = run_cell(cell, Setting("cpu", 64, 5, timeout_s=120))
    assert sample.error.startswith("TypeError: unsupported operand")


def test_row_that_failed_is_not_run_again():
    cells = plan_cells(TOWERS, ["small"], ["plain", "towers"], [2], 2, False)
    samples = [Sample(cells[0], {}), Sample(cells[1], error="exit code 1")]
    assert [failed_before(cell, samples) for cell in cells[2:]] == [False, True]


def rank(step_ms, witness, loss=1.0):
    return {
        "step_ms": step_ms,
        "first_step_s": 2 * loss,
        "epoch_cost_s": None,
        "memory_mb": 100 * loss,
        "loss": loss,
        "choice": "shared memory",
        "jit_compile": False,
        "witness": witness,
    }


def ranks_of(row):
    return Cell("processes", "small", row, 2, 0)


def test_ranks_are_put_together():
    ranks = [rank([1.0, 2.0], [0.5], 2.0), rank([3.0], [0.5], 4.0)]
    assert combine(ranks_of("strategy"), ranks) == {
        "step_ms": [1.0, 2.0, 3.0],
        "first_step_s": 6.0,
        "epoch_cost_s": None,
        "memory_mb": 300.0,
        "loss": 3.0,
        "how": "shared memory",
        "jit_compile": False,
    }


@pytest.mark.parametrize("other", [0.6, float("nan")])
def test_row_that_exchanges_nothing_is_found_out(other):
    ranks = [rank([1.0], [0.5]), rank([1.0], [other])]
    with pytest.raises(WorkerFailed, match="gradients were not exchanged"):
        combine(ranks_of("strategy"), ranks)
    assert combine(ranks_of("compute"), ranks)["step_ms"] == [1.0, 1.0]
