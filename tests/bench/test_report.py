"""The benchmark's tables and its JSON file."""

import io
import json
import re

import pytest
from rich.console import Console

from keras_towers.bench.plan import Cell
from keras_towers.bench.report import show_report, write_json
from keras_towers.bench.runner import Sample

FACTS = {"processor": "a processor", "cores": 2, "gpus": [], "keras": "3.15.1"}


def sample(kind, row, replicas, repeat, ms, **result):
    cell = Cell(kind, "large", row, replicas, repeat)
    return Sample(cell, {"step_ms": [ms], "epoch_cost_s": 0.1, **result})


TOWERS = [
    sample("training", row, towers, repeat, ms * (1 + repeat), **result)
    for repeat in (0, 1)
    for towers in (2, 4)
    for row, ms, result in (
        ("plain", 10.0, {}),
        ("stock-default", 20.0 - 5 * repeat, {}),
        ("towers", 5.0, {"mode": "cpu"}),
        ("towers-cpu", 5.0, {"mode": "cpu"}),
    )
]
PROCESSES = [
    sample("processes", "compute", 2, 0, 10.0),
    sample("processes", "strategy", 2, 0, 12.0, how="shared memory"),
    Sample(Cell("processes", "large", "stock-loop", 2, 0), error="exit code 1"),
]
SECONDS = {"adopt_s": [0.5, 0.25], "release_s": [0.125], "copy_s": [0.0625]}
ADOPTION = [
    Sample(
        Cell("adoption", "adoption", "towers", 2, 0), {"bytes": 1e8, **SECONDS}
    ),
    Sample(Cell("adoption", "adoption", "async", 2, 0), error="[bad]"),
]


def shown(samples, width=80):
    console = Console(file=io.StringIO(), width=width)
    show_report(console, FACTS, samples)
    return console.file.getvalue()


def test_table_of_towers():
    text = shown(TOWERS)
    assert re.search(r" 2 +plain +15\.0 +1\.00 +0\.58 ", text)
    # Numbers of towers are told once, each above its rows.
    assert re.search(r"\n +stock-default \* +25\.0 +1\.75 +1\.00 ", text)
    assert re.search(r"\n +1\.50–2\.00", text)
    assert re.search(r"\n +towers \(cpu\) +7\.50 +0\.50 ", text)
    assert re.search(r"\n +towers-cpu +7\.50 ", text)
    assert re.search(r"\n +\n +4 +plain ", text)
    assert "1.75 1.50–2.00" in shown(TOWERS, width=120)
    assert "a processor, 2 cores, no GPU; Keras 3.15.1" in text


def test_table_of_what_a_row_needs_until_it_trains():
    rows = [("plain", 2.5), ("stock-one-device", 10.0), ("towers", 5.0)]
    text = shown(
        [
            sample("training", row, 2, 0, 1.0, first_step_s=s, memory_mb=50 * s)
            for row, s in rows
        ]
    )
    _, _, table = text.partition("until it trains")
    assert re.search(r" towers +5\.0 s +2\.00 +0\.50 +250 MB +2\.00 +0", table)
    assert re.search(r"memory:\s+growth", table)
    assert "until it trains" not in shown(TOWERS)


def test_table_of_processes():
    text = shown(PROCESSES)
    assert re.search(r" 2 +compute +10\.0 +– +– +0\.10 s", text)
    assert re.search(r"strategy \(shared memory\) +12\.0 +2\.00 +–", text)
    assert re.search(r"stock-loop failed +– +– +– +–", text)
    assert "failed: large, 2 processes, stock-loop\nexit code 1\n" in text
    assert "strategy: HorovodStrategy(); strategy-NAME" in text
    assert "horovod-raw:" not in text


def test_table_of_adoption():
    text = shown(ADOPTION)
    assert re.search(
        r" 2 +towers +0\.500 s +0\.250 s +4\.0 +0\.125 s +2\.0 ", text
    )
    assert re.search(r"\n +async failed +– +– +– +– +– ", text)
    assert "failed: adoption, 2 towers, async\n[bad]" in text


@pytest.mark.parametrize(
    ("samples", "kind", "keys"),
    [
        (
            TOWERS,
            "training",
            "model towers strategy step_ms to_plain to_stock_default "
            "to_best_stock best_stock epoch_cost_s first_step_s "
            "first_step_s_to_plain first_step_s_to_best_stock memory_mb "
            "memory_mb_to_plain memory_mb_to_best_stock mode failed",
        ),
        (
            PROCESSES,
            "processes",
            "model processes row step_ms cost_ms to_raw epoch_cost_s "
            "first_step_s memory_mb how failed",
        ),
        (
            ADOPTION,
            "adoption",
            "towers strategy megabytes copy_s first_adopt_s adopt_s release_s "
            "failed",
        ),
    ],
)
def test_json_has_the_documented_names(tmp_path, samples, kind, keys):
    path = tmp_path / "bench.json"
    write_json(path, FACTS, {"batches": 3}, samples)
    document = json.loads(path.read_text())
    assert document["machine"] == FACTS
    assert document["settings"] == {"batches": 3}
    first = document[kind][0]
    assert list(first) == keys.split()
    if "step_ms" in first:
        assert list(first["step_ms"]) == ["median", "low", "high"]
    assert list(document["samples"][0]) == ["job", "result", "error"]
    assert sorted(document["samples"][0]["job"]) == sorted(
        ["kind", "model", "strategy", "towers", "repeat"]
    )
    others = {"training", "processes", "adoption"} - {kind}
    assert all(document[other] == [] for other in others)
