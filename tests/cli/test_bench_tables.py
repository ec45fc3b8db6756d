"""The figures of rows, and their table."""

import io
import re

import pytest
from rich.console import Console

from keras_towers.bench.rows import ROWS, find_row
from keras_towers.cli.bench import COLUMNS, print_tables, summarize
from tests.bench.shared import samples_of

pytestmark = pytest.mark.core


def figures_of(rows, devices=2):
    """The figures of rows, by their names."""
    samples = samples_of(rows)
    results = summarize(ROWS, samples, batch=64, devices=devices)
    assert [result.row for result in results] == list(rows)
    return {result.row: result.figures for result in results}


def test_rows_are_compared_in_each_repeat():
    found = figures_of(
        {
            "plain": [2.0, 4.0],
            "stock-default": [2.0, 9.0],
            "stock-one-device": [3.0, 5.0],
            "tower": [1.5, 6.0],
        }
    )
    assert found["tower"]["to_plain"] == [0.75, 1.5]
    # Another one is the fastest in each repeat.
    assert found["tower"]["to_stock"] == [0.75, 1.2]
    assert found["tower"]["efficiency"] == [pytest.approx(2 / 3), 1 / 3]
    assert found["tower"]["examples_per_s"] == [64 / 0.0015, 64 / 0.006]
    assert "efficiency" not in found["plain"]


def test_devices_that_share_cores_have_no_efficiency():
    found = figures_of({"plain": [2.0], "tower": [1.5]}, devices=1)
    assert "efficiency" not in found["tower"]


def test_cost_is_above_processes_that_exchange_nothing():
    found = figures_of({"compute": [10.0, 20.0], "horovod": [15.0, 22.0]})
    assert found["horovod"]["cost_ms"] == [5.0, 2.0]
    assert not {"cost_ms", "to_plain", "to_stock"} & set(found["compute"])


def test_a_failure_keeps_what_was_measured_before():
    samples = samples_of({"plain": [1.0, 1.0], "tower": [2.0, "broke"]})
    plain, tower = summarize(ROWS, samples, batch=64, devices=2)
    assert (plain.error, tower.error) == ("", "broke")
    assert tower.figures["to_plain"] == [2.0]


def shown(samples):
    rows = {s.cell.row: find_row(ROWS, s.cell.row) for s in samples}
    console = Console(file=io.StringIO(), width=80)
    results = summarize(rows, samples, batch=64, devices=2)
    columns = [c for c in COLUMNS if c not in ("examples_per_s", "efficiency")]
    print_tables(results, rows, {"large": "large, a model"}, columns, console)
    return console.file.getvalue()


def test_table_shows_medians_and_ranges():
    rows = {"stock-default": [20.0, 30.0], "tower:mode=cpu": [5.0, 10.0]}
    samples = samples_of({"plain": [10.0, 20.0]})
    for towers in (2, 4):
        samples += samples_of(rows, towers)
    text = shown(samples)
    assert "large, a model" in text
    assert re.search(
        r" 1 +plain +15\.00 +1\.00 +– +1\.5 s +0\.10 s +10 MB", text
    )
    assert re.search(r" 2 +stock-default \* +25\.00 +1\.75 +1\.00 ", text)
    assert re.search(r"\n +1\.50–2\.00", text)
    assert re.search(r"\n +2 +tower:mode=cpu +7\.50 +0\.50 ", text)
    assert re.search(r"\n +\n +4 +stock-default ", text)


def test_table_of_processes_shows_failures_and_cost():
    rows = {"compute": [10.0], "horovod": [12.0]}
    text = shown(samples_of({**rows, "multi-worker": ["exit code 1"]}))
    assert re.search(r" 2 +compute +10\.00 +– ", text)
    assert re.search(r" horovod +12\.00 +2\.00 ", text)
    assert re.search(r" multi-worker failed +– +– +– ", text)
    assert "failed: large, 2 replicas, multi-worker\nexit code 1\n" in text
    assert "horovod: HorovodStrategy()." in text
