"""``keras-towers bench`` with workers that are faked, and its table."""

import importlib.util
import io
import json
import re

import pytest
from rich.console import Console

from keras_towers.bench import runner
from keras_towers.bench.rows import ROWS, find_row
from keras_towers.cli import probe
from keras_towers.cli.bench import COLUMNS, print_tables, summarize
from keras_towers.errors import TowerError
from tests.bench.shared import FACTS, RANK, invoke, samples_of

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Answer for the worker processes, on as many cores as are set here."""
    facts = FACTS | {"cores": 6}

    def store(model, folder, setting):
        if model == "mine:bad":
            raise TowerError(f"{model} returned 3")
        return f"{model}, a model"

    def workers(row, cell, setting, stored):
        if (cell.row, cell.replicas) == ("tower", 4):
            raise TowerError("exit code 1\nValueError: [bad]")
        return [RANK]

    find = importlib.util.find_spec
    missing = {"byteps": None, "horovod": "found"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: missing[name] if name in missing else find(name),
    )
    monkeypatch.setattr(runner, "store", store)
    monkeypatch.setattr(runner, "run_workers", workers)
    monkeypatch.setattr(probe, "machine_facts", lambda timeout_s: facts)
    return facts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--models huge", "--models huge is not allowed: choose small, large"),
        ("--models mine:bad", "mine:bad returned 3"),
        ("--models ,", "choose small, large, cnn"),
        ("--strategies plain,magic", "unknown strategy 'magic'; choose"),
        ("--strategies plain:a=1", "unknown strategy 'plain:a=1'"),
        ("--strategies multi-worker", "multi-worker needs --processes N"),
        ("--processes 2 --strategies tower", "needs --towers N"),
        ("--processes 2 --strategies byteps", "`keras-towers install byteps`"),
        ("--towers two", "whole numbers from 1, not 'two'"),
        ("--processes 1,2", "whole numbers from 2, not '1,2'"),
        ("--towers 2 --device gpu", "2 GPUs are needed, 0 visible"),
        ("--towers 6", "6 replicas cannot share --batch-size 64"),
        ("--batch-size 61", "4 replicas cannot share --batch-size 61"),
        ("--json /no/such/folder/a.json", "'/no/such/folder/a.json' (No such"),
        ("--json /tmp", "bench cannot write '/tmp' (Is a"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(arguments, said):
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    refused = result.output.partition("keras-towers bench: ")[2]
    assert said in refused
    assert len(refused.strip().splitlines()) == 1


def test_failed_row_is_said_and_ends_in_exit_code_1(tmp_path):
    path = tmp_path / "bench.json"
    result = invoke(
        "--models=small",
        "--strategies=plain,stock-default,tower",
        "--towers=2,4",
        f"--json={path}",
    )
    assert result.exit_code == 1
    assert "small, a model" in result.output
    assert "tower failed" in result.output
    assert "failed: small, 4 replicas, tower" in result.output
    assert "ValueError: [bad]" in result.output
    document = json.loads(path.read_text())
    assert document["machine"] == FACTS | {"cores": 6}
    assert document["complete"]
    # Three repeats of all, but for what has failed before.
    assert len(document["samples"]) == 3 * 4 + 1
    assert list(document["samples"][0]) == ["cell", "result", "error"]
    assert sum(bool(row["error"]) for row in document["results"]) == 1


def measured(path, *arguments):
    result = invoke("--json", str(path), "--repeats", "1", *arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    rows = [sample["cell"]["row"] for sample in document["samples"]]
    return document, rows


@pytest.mark.parametrize(("cores", "towers"), [(1, 2), (3, 2), (6, 4), (16, 8)])
def test_towers_are_as_many_as_there_are_cores(
    machine, tmp_path, cores, towers
):
    machine["cores"] = cores
    document, _ = measured(tmp_path / "a.json", "--strategies=async")
    replicas = [sample["cell"]["replicas"] for sample in document["samples"]]
    assert replicas == [1, towers]


def test_rows_that_are_measured_if_none_is_named(tmp_path):
    _, rows = measured(tmp_path / "a.json", "--towers", "2")
    assert {"plain", "stock-default", "tower", "async"} <= set(rows)
    assert not {"horovod", "compute", "noop"} & set(rows)
    _, rows = measured(tmp_path / "b.json", "--processes", "2")
    assert {"plain", "compute", "horovod", "sync-replicas"} <= set(rows)
    assert not {"tower", "byteps"} & set(rows)


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
