"""Which rows of the field count, its figures, and its pictures."""

import json
import math

import pytest
from typer.testing import CliRunner

from benchmarks.field import FIELD, app
from keras_towers.bench import runner
from keras_towers.bench.compare import TOLERANCE, Comparison, difference
from keras_towers.bench.rows import Row, find
from keras_towers.bench.runner import Cell, Sample, Setting
from keras_towers.doctor import probe
from keras_towers.errors import TowerError
from tests.bench.shared import FACTS, RANK


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ([2.5 * (1 + 0.9 * TOLERANCE)], [2.5], ""),
        ([2.5, 0.123], [2.5, 0.456], "step 2 on (0.123 against 0.456)"),
        ([math.nan], [1.0], "step 1 on (nan against 1)"),
        # A reference that has diverged is none.
        ([math.nan], [math.nan], "step 1 on (nan against nan)"),
        ([1.0], [], "plain Keras failed"),
    ],
)
def test_row_counts_only_with_the_losses_of_the_reference(mine, other, said):
    found = difference(mine, other)
    assert said in found and bool(said) == bool(found)


GOOD, BAD = [2.0, 1.0], [2.0, 1.5]


def sample(row, devices, ms, losses=GOOD, repeat=0):
    cell = Cell("small", row, devices, repeat)
    return Sample(cell, RANK | {"step_ms": [ms], "losses": losses})


SAMPLES = [
    sample("plain", 1, 16.0),
    sample("plain-jax", 1, 8.0),
    sample("compute", 2, 9.0, BAD),
    sample("compute-jax", 2, 5.0, BAD),
    sample("stock-default", 2, 20.0, BAD),
    Sample(Cell("small", "stock-loop", 2, 0), error="[bad]"),
    sample("jax-data-parallel", 2, 8.0),
    sample("tower", 2, 10.0),
]


def results_of(samples, cores=8):
    setting = Setting("cpu", 64, 5, 60, frameworks=True)
    facts = FACTS | {"cores": cores}
    field = Comparison(FIELD, {}, ["small"], {}, setting, facts, samples)
    return {result["row"]: result for result in field.results()}


def test_figures_are_relative_to_the_same_backend():
    names = ("step_ms", "examples_per_s", "efficiency", "cost_ms")
    found = results_of(SAMPLES)
    figures = {
        row: [result[name] and result[name].median for name in names]
        for row, result in found.items()
    }
    assert figures == {
        "plain": [16.0, 4000.0, None, None],
        "plain-jax": [8.0, 8000.0, None, None],
        "compute": [9.0, 64 / 0.009, 8 / 9, None],
        "compute-jax": [5.0, 12800.0, 0.8, None],
        "stock-default": [None] * 4,
        "stock-loop": [None] * 4,
        "jax-data-parallel": [8.0, 8000.0, 0.5, 3.0],
        "tower": [10.0, 6400.0, 0.8, 1.0],
    }
    assert found["stock-loop"]["error"] == "[bad]"
    assert found["stock-default"]["reason"].startswith("loss differs")
    # Devices that share cores have none.
    assert results_of(SAMPLES, cores=1)["tower"]["efficiency"] is None


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "plain Keras failed"),
        (
            [
                *SAMPLES,
                sample("plain", 1, 16.0, repeat=1),
                sample("tower", 2, 10.0, BAD, 1),
            ],
            "loss differs",
        ),
    ],
)
def test_row_that_does_not_count(samples, reason):
    tower = results_of([*samples, sample("tower", 2, 10.0)])["tower"]
    assert reason in tower["reason"]
    assert tower["step_ms"] is tower["memory_mb"] is None


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run the command, with workers that are faked."""

    def workers(model, stored, setting, row=None, cell=None):
        if cell is None:
            return [{"title": model}]
        assert setting.rows == "benchmarks.field:FIELD"
        if row.name == "horovod-raw":
            raise TowerError("exit code 1")
        return [RANK | {"losses": GOOD}]

    monkeypatch.setattr(runner, "run_workers", workers)
    monkeypatch.setattr(probe, "machine_facts", lambda timeout_s: FACTS)
    monkeypatch.setattr(Row, "missing", "")

    def run(*arguments):
        return CliRunner().invoke(app, arguments)

    return run


def test_field_is_measured_and_shown(command, tmp_path):
    report = tmp_path / "field.json"
    ended = command("--models=small", f"--json={report}")
    assert ended.exit_code == 1
    assert "failed: small, 2 replicas, horovod-raw" in ended.output
    document = json.loads(report.read_text())
    found = {result["row"]: result for result in document["results"]}
    listed = {"plain", "torch-ddp", "jax-data-parallel", "stock-loop", "tower"}
    assert listed <= set(found) and "async" not in found
    failed = [name for name, result in found.items() if result["error"]]
    assert failed == ["horovod-raw"]
    assert found["tower"]["efficiency"]
    assert find(FIELD, "torch-ddp").compute == "compute-torch"
