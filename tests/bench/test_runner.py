"""Planning the cells, and what becomes of them."""

import pytest

from keras_towers.bench import runner
from keras_towers.bench.plan import Cell, Setting, plan_cells
from keras_towers.bench.rows import PROCESSES, TOWERS
from keras_towers.bench.runner import Sample, WorkerFailed, combine, run_cell

STRATEGY, COMPUTE = (
    Cell("processes", "small", row, 2, 0) for row in ("strategy", "compute")
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
    cells = plan_cells(
        TOWERS, ["small"], ["plain", "towers"], [1, 2], 3, adoption=True
    )
    assert [cell.title for cell in cells if cell.kind == "adoption"] == [
        "adoption, 1 tower, towers",
        "adoption, 2 towers, towers",
    ]
    assert COMPUTE.title == "small, 2 processes, compute"


@pytest.mark.parametrize(
    ("name", "fake", "error"),
    [
        ("run_python", lambda *arguments: None, "a process wrote no result"),
        # It loses only itself.
        ("_run_cell", lambda *arguments: [] - [], "TypeError: unsupported op"),
    ],
)
def test_cell_without_a_result(monkeypatch, name, fake, error):
    monkeypatch.setattr(runner, name, fake)
    sample = run_cell(COMPUTE, Setting("cpu", 64, 5, timeout_s=120))
    assert sample.error.startswith(error)


def test_row_that_failed_is_not_run_again():
    cells = plan_cells(TOWERS, ["small"], ["plain", "towers"], [2], 2, False)
    samples = [Sample(cells[0], {}), Sample(cells[1], error="exit code 1")]
    assert [runner.failed_before(cell, samples) for cell in cells[2:]] == [
        False,
        True,
    ]


def rank(loss, witness=0.5):
    means = {"first_step_s": 2 * loss, "epoch_cost_s": None, "loss": loss}
    of = {"step_ms": [loss, 9.0], "memory_mb": 100 * loss, "jit_compile": False}
    return means | of | {"choice": "shared memory", "witness": [witness]}


def test_ranks_are_put_together():
    assert combine(STRATEGY, [rank(2.0), rank(4.0)]) == {
        "step_ms": [2.0, 9.0, 4.0, 9.0],
        "first_step_s": 6.0,
        "epoch_cost_s": None,
        "memory_mb": 300.0,
        "loss": 3.0,
        "how": "shared memory",
        "jit_compile": False,
    }


@pytest.mark.parametrize("other", [0.6, float("nan")])
def test_row_that_exchanges_nothing_is_found_out(other):
    ranks = [rank(1.0), rank(1.0, other)]
    with pytest.raises(WorkerFailed, match="gradients were not exchanged"):
        combine(STRATEGY, ranks)
    assert combine(COMPUTE, ranks)["loss"] == 1.0
