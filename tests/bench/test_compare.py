"""The arithmetic of the benchmark's table, and the table."""

import io
import re

import pytest
from rich.console import Console

from keras_towers.bench.compare import COLUMNS, Comparison, Spread, summarize
from keras_towers.bench.rows import ROWS, find
from keras_towers.bench.runner import Setting
from tests.bench.shared import FACTS, samples_of

pytestmark = pytest.mark.core


def same(value):
    return (value, value, value)


# Rows, and columns of some of them: the median, the minimum and the maximum.
CASES = {
    # The ratio of medians would be 1.25.
    "median step of a run, then ratios repeat by repeat": (
        {
            "plain": [[1.0, 2.0, 90.0], [4.0]],
            # Faster once, but not in the median.
            "stock-default": [[2.0], [9.0]],
            "stock-one-device": [[3.0], [5.0]],
            "stock-hierarchical": ["broke"],
            "tower": [{"step_ms": [1.5], "choice": "cpu"}, [6.0]],
        },
        {
            "plain": {"step_ms": (3.0, 2.0, 4.0)},
            "tower": {
                "choice": "cpu",
                "best_stock": "stock-one-device",
                "to_plain": (1.125, 0.75, 1.5),
                "to_stock": (0.85, 0.5, 1.2),
                "error": "",
            },
        },
    ),
    "a failure keeps what was measured before": (
        {
            "plain": [[1.0], [1.0]],
            "tower": [[2.0], "broke"],
            "async": ["broke"],
        },
        {
            "plain": {"error": "", "best_stock": ""},
            "tower": {"error": "broke", "to_plain": same(2.0)},
            "async": dict.fromkeys(["step_ms", "epoch_cost_s", "to_plain"])
            | {"error": "broke"},
        },
    ),
    "cost above compute of the same repeat": (
        {
            "compute": [[10.0], [20.0]],
            "multi-worker": [[30.0], [30.0]],
            "horovod": [[15.0], [22.0]],
        },
        {
            "compute": {"cost_ms": None},
            "multi-worker": {"cost_ms": (15.0, 10.0, 20.0)},
            "horovod": {"step_ms": (18.5, 15.0, 22.0), "cost_ms": (3.5, 2, 5)},
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_are_computed_repeat_by_repeat(name):
    rows, wanted = CASES[name]
    results = summarize(ROWS, samples_of(rows), batch=64, devices=2)
    assert [result["row"] for result in results] == list(rows)
    found = {result["row"]: result for result in results}
    for row, columns in wanted.items():
        for column, value in columns.items():
            if isinstance(value, tuple):
                value = Spread(*map(pytest.approx, value))
            assert found[row][column] == value, (row, column)


def shown(samples):
    rows = {s.cell.row: find(ROWS, s.cell.row) for s in samples}
    titles, skipped = {"large": "large, a model"}, {"byteps": "run `[x]`"}
    console = Console(file=io.StringIO(), width=80)
    comparison = Comparison(
        rows,
        skipped,
        ["large"],
        {},
        Setting("cpu", 64, 5, 60),
        FACTS,
        samples,
        titles=titles,
    )
    columns = [c for c in COLUMNS if c not in ("examples_per_s", "efficiency")]
    comparison.show(console, columns)
    return console.file.getvalue()


def test_table_shows_medians_ranges_and_where():
    fast, slow = [[5.0], [10.0]], [[20.0], [30.0]]
    rows = {"stock-default": slow, "tower": fast, "tower:mode=cpu": fast}
    of_towers = [samples_of(rows, towers, choice="cpu") for towers in (2, 4)]
    plain = samples_of({"plain": [[10.0], [20.0]]})
    text = shown(sum(of_towers, plain))
    assert "large, a model" in text
    assert re.search(
        r" 1 +plain +15\.00 +1\.00 +– +1\.5 s +0\.10 s +10 MB", text
    )
    # Numbers of towers are told once, each above its rows.
    row = r" 2 +stock-default \(cpu\) \* +25\.00 +1\.75 +1\.00 "
    assert re.search(row, text)
    assert re.search(r"\n +1\.50–2\.00", text)
    assert re.search(r"\n +tower \(cpu\) +7\.50 +0\.50 ", text)
    # Its name says so.
    assert re.search(r"\n +tower:mode=cpu +7\.50 ", text)
    assert re.search(r"\n +\n +4 +stock-default ", text)
    assert "a processor, 2 cores, no GPU; TensorFlow 2.21.0, Keras 3.1" in text
    assert "skipped: byteps: run `[x]`" in text


def test_table_of_processes_shows_failures_and_cost():
    rows = {"compute": [[10.0]], "horovod": [[12.0]]}
    text = shown(samples_of({**rows, "multi-worker": ["exit code 1"]}))
    assert re.search(r" 2 +compute +10\.00 +– ", text)
    assert re.search(r" horovod +12\.00 +2\.00 ", text)
    assert re.search(r" multi-worker failed +– +– +– ", text)
    assert "failed: large, 2 replicas, multi-worker\nexit code 1\n" in text
    assert "horovod: HorovodStrategy()." in text
