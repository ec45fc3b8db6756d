"""``keras-towers bench`` with workers that are faked."""

import importlib.util
import json

import pytest

from keras_towers.cli import installed
from keras_towers.foundation.errors import TowerError
from keras_towers.inspection.bench import runner
from tests.inspection.bench.shared import FACTS, RANK, invoke

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Answer for the worker processes, on as many cores as are set here."""
    facts = FACTS | {"cores": 6}

    def store(model, folder, setting):
        if model == "json:bad":
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
    monkeypatch.setattr(installed, "machine_facts", lambda timeout_s: facts)
    return facts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--models huge", "--models huge is not allowed: choose small, large"),
        ("--models json:bad", "json:bad returned 3"),
        ("--models ,", "choose small, large, or"),
        ("--strategies plain,magic", "unknown strategy 'magic'; choose"),
        ("--strategies towr", "such as tower:mode=host. Did you mean 'tower'?"),
        ("--strategies plain:a=1", "unknown strategy 'plain:a=1'"),
        ("--strategies tower:mod=cpu", "option 'mod'. Did you mean 'mode'?"),
        ("--strategies async:tower=2", "Did you mean 'towers'?"),
        ("--strategies tower:mode=gpus", "mode='gpus' is not allowed: give"),
        ("--strategies compute", "unknown strategy 'compute'; choose"),
        ("--strategies multi-worker", "multi-worker needs --processes N"),
        ("--processes 2 --strategies tower", "needs --towers N"),
        ("--processes 2 --strategies byteps", "`keras-towers install byteps`"),
        ("--towers two", "whole numbers from 1, not 'two'"),
        ("--processes 1,2", "whole numbers from 2, not '1,2'"),
        ("--towers 2 --device gpu", "2 GPUs are needed, but 0 are visible"),
        ("--memory-limit 99", "splits a GPU, but none is visible"),
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
        "--strategies=tower,async",
        "--towers=2,4",
        f"--json={path}",
    )
    assert result.exit_code == 1
    assert "small, 1 replica, plain (1 of 15)\n" in result.output
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


def test_rows_that_are_measured_if_none_is_named(machine, tmp_path):
    machine["cores"] = 2
    for options, wanted in {
        "": ["plain", "tower"],
        "--towers 2": ["plain", "tower"],
        "--processes 2": ["plain", "multi-worker"],
        "--towers 2 --processes 2": ["plain", "tower", "multi-worker"],
    }.items():
        _, rows = measured(tmp_path / "a.json", *options.split())
        assert rows == wanted
