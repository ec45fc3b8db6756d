"""The field: which of its rows are measured, and which count."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks import field
from benchmarks.field import app
from keras_towers.cli import installed
from keras_towers.cli.bench import summarize
from keras_towers.foundation.errors import TowerError
from keras_towers.inspection.bench import runner
from keras_towers.inspection.bench.rows import Row
from tests.inspection.bench.shared import FACTS, RANK, samples_of


def test_figures_are_relative_to_the_same_backend(monkeypatch):
    monkeypatch.setattr(field, "usable_cores", lambda: 8)
    rows = {
        **{"plain": [16.0], "plain-jax": [8.0], "compute": [9.0]},
        **{"compute-jax": [5.0], "jax-data-parallel": [8.0]},
        **{"stock-default": [4.0], "stock-one-device": [3.0], "tower": [1.5]},
    }
    samples = samples_of(rows)
    results = summarize(samples, field.columns_of(64))
    found = {result.row: result.figures for result in results}
    jax, tower = found["jax-data-parallel"], found["tower"]
    assert jax["efficiency"] == [0.5] and jax["cost_ms"] == [3.0]
    assert tower["to_stock"] == [0.5]
    assert tower["examples_per_s"] == [64 / 0.0015]
    assert "cost_ms" not in found["compute"]
    monkeypatch.setattr(field, "usable_cores", lambda: 1)
    *_, tower = summarize(samples, field.columns_of(64))
    assert "efficiency" not in tower.figures
    options = ["-H", "localhost:2", "--no-strategy", "--workers", "2"]
    assert field.FIELD["compute"].launcher(2) == options


@pytest.fixture
def command(monkeypatch):
    """Run the command, with workers that are faked."""

    def workers(row, cell, setting, stored):
        assert setting.rows == "benchmarks.field:FIELD"
        if row.name == "horovod-raw":
            raise TowerError("exit code 1")
        differs = not row.exact or row.name == "stock-loop"
        return [RANK | {"losses": [2.0, 1.5 if differs else 1.0]}]

    monkeypatch.setattr(runner, "store", lambda model, *rest: model)
    monkeypatch.setattr(runner, "run_workers", workers)
    monkeypatch.setattr(installed, "machine_facts", lambda timeout_s: FACTS)
    monkeypatch.setattr(Row, "missing", "")
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_a_row_counts_only_with_the_losses_of_one_device(command, tmp_path):
    report = tmp_path / "field.json"
    ended = command("--models=small", f"--json={report}")
    assert ended.exit_code == 1
    assert "failed: small, 2 replicas, horovod-raw" in ended.output
    document = json.loads(report.read_text())
    found = {result["row"]: result for result in document["results"]}
    listed = {"plain", "torch-ddp", "jax-data-parallel", "compute", "tower"}
    assert listed <= set(found) and "async" not in found
    errors = {row: r["error"] for row, r in found.items() if r["error"]}
    assert errors == {
        "horovod-raw": "exit code 1",
        "stock-loop": "loss differs from step 2 on (1.5 against 1)",
    }
    assert found["tower"]["figures"]["efficiency"]
