"""The figures of rows, and their table."""

import io
import re

import pytest
from rich.console import Console

from keras_towers.cli.bench import COLUMNS, print_tables, summarize
from keras_towers.inspection.bench.rows import ROWS, find_row
from tests.inspection.bench.shared import samples_of

pytestmark = pytest.mark.core


def test_a_failure_keeps_what_was_measured_before():
    samples = samples_of({"plain": [1.0, 1.0], "tower": [2.0, "broke"]})
    plain, tower = summarize(samples, COLUMNS)
    assert (plain.error, tower.error) == ("", "broke")
    assert tower.figures["to_plain"] == [2.0]


def shown(samples):
    rows = {s.cell.row: find_row(ROWS, s.cell.row) for s in samples}
    console = Console(file=io.StringIO(), width=80)
    results = summarize(samples, COLUMNS)
    titles = {"large": "large, a model"}
    print_tables(results, rows, titles, COLUMNS, console)
    return console.file.getvalue()


def test_table_shows_medians_and_ranges():
    rows = {"async": [20.0, 30.0], "tower:mode=host": [5.0, 10.0]}
    samples = samples_of({"plain": [10.0, 20.0]})
    for towers in (2, 4):
        samples += samples_of(rows, towers)
    text = shown(samples)
    assert "large, a model" in text
    assert re.search(r" 1 +plain +15\.00 +1\.00 +1\.5 s +10 MB", text)
    assert re.search(r" 2 +async +25\.00 +1\.75 ", text)
    assert re.search(r"\n +1\.50–2\.00", text)
    assert re.search(r"\n +2 +tower:mode=host +7\.50 +0\.50 ", text)
    assert re.search(r"\n +\n +4 +async ", text)
    alone = [s for n in (2, 4) for s in samples_of({"async": [2.0]}, n)]
    assert re.search(r" 2 +async .*\n +4 +async ", shown(alone))


def test_table_shows_failures():
    text = shown(
        samples_of({"horovod": [12.0], "multi-worker": ["exit code 1"]})
    )
    assert re.search(r" horovod +12\.00 ", text)
    assert re.search(r" multi-worker failed +– +– ", text)
    assert "failed: large, 2 replicas, multi-worker\nexit code 1\n" in text
    assert "horovod: HorovodStrategy()." in text
    # Nothing to be relative to was measured.
    assert "÷ plain" not in text


def test_a_long_name_leaves_numbers_whole():
    name = "horovod:towers=2:weights=sharded:shard_over=process"
    text = shown(samples_of({"plain": [15.0], name: [12345.0]}))
    assert re.search(r" 12345\.00 +823\.00 +1\.5 s +10 MB", text)
    assert name in "".join(re.findall(r"^ +(?:2 +)?([\w:=]+)", text, re.M))
