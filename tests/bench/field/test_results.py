"""The figures of the field, and how they are shown."""

import io
import json
import re

import pytest
from rich.console import Console

from keras_towers.bench.field.plan import FieldCell
from keras_towers.bench.field.report import Field, show_field
from keras_towers.bench.field.results import FIGURES, summarize_field
from keras_towers.bench.field.runner import FieldSample, combine
from keras_towers.bench.runner import WorkerFailed

pytestmark = pytest.mark.core

GOOD, BAD = [2.0, 1.0], [2.0, 1.5]


def sample(row, devices, ms, losses=GOOD, repeat=0, model="small"):
    return FieldSample(
        FieldCell(model, row, devices, repeat),
        {
            "step_ms": [ms],
            "losses": losses,
            "frozen_losses": [2.0, 2.0],
            "first_step_s": 1.5,
            "memory_mb": 20.0,
        },
    )


FAILED = FieldSample(FieldCell("small", "stock-loop", 2, 0), error="[bad]")
SAMPLES = [
    sample("keras-tensorflow", 1, 16.0),
    sample("keras-jax", 1, 8.0),
    sample("stock-default", 2, 20.0, BAD),
    FAILED,
    sample("jax-data-parallel", 2, 8.0),
    sample("towers", 2, 10.0),
    sample("compute-tensorflow", 2, 9.0, BAD),
    sample("compute-jax", 2, 5.0, BAD),
]


def results_of(samples, most=8):
    return {
        result["row"]: result for result in summarize_field(samples, 64, most)
    }


def test_figures_are_relative_to_the_same_backend():
    rows = results_of(SAMPLES)
    # What exchanges nothing is a divisor, and no row.
    assert list(rows) == [
        *("keras-tensorflow", "keras-jax", "stock-default", "stock-loop"),
        *("jax-data-parallel", "towers"),
    ]
    medians = {
        name: {
            key: rows[name][key] and rows[name][key].median for key in FIGURES
        }
        for name in rows
    }
    assert medians["towers"] == {
        "step_ms": 10.0,
        "examples_per_s": 6400.0,
        "efficiency": 0.8,
        "compute_ms": 9.0,
        "rest_ms": 1.0,
        "first_step_s": 1.5,
        "memory_mb": 20.0,
    }
    assert medians["jax-data-parallel"]["efficiency"] == 0.5
    assert medians["jax-data-parallel"]["rest_ms"] == 3.0
    assert medians["keras-jax"]["examples_per_s"] == 8000.0
    assert medians["keras-jax"]["efficiency"] is None


def test_row_that_does_not_count_has_no_figures():
    rows = results_of(SAMPLES)
    for name in ("stock-default", "stock-loop"):
        assert not rows[name]["counts"]
        assert {rows[name][figure] for figure in FIGURES} == {None}
    assert rows["stock-default"]["reason"] == (
        "loss differs from step 2 on (1.500 against 1.000)"
    )
    assert rows["stock-loop"]["failed"]
    # Nor one that agreed in another repeat.
    again = [
        sample("keras-tensorflow", 1, 16.0, repeat=1),
        sample("towers", 2, 10.0, BAD, repeat=1),
    ]
    assert not results_of([*SAMPLES, *again])["towers"]["counts"]


def test_without_its_reference_nothing_counts():
    rows = results_of([sample("towers", 2, 10.0)])
    assert rows["towers"]["reason"] == "the reference failed"
    other = sample("keras-tensorflow", 1, 1.0, model="large")
    assert not results_of([other, sample("towers", 2, 10.0)])["towers"][
        "counts"
    ]


def test_devices_that_share_cores_have_no_efficiency():
    assert results_of(SAMPLES, most=1)["towers"]["efficiency"] is None


def test_row_is_not_divided_by_one_device_that_does_not_count():
    samples = [*SAMPLES, sample("keras-jax", 1, 8.0, BAD, repeat=1)]
    samples += [sample("keras-tensorflow", 1, 16.0, repeat=1)]
    rows = results_of(samples)
    assert rows["jax-data-parallel"]["counts"]
    assert rows["jax-data-parallel"]["efficiency"] is None
    assert rows["towers"]["efficiency"].median == 0.8


def rank(losses, witness):
    means = {"first_step_s": 1.0, "memory_mb": 2.0, "epoch_cost_s": None}
    return {
        "step_ms": [losses[0]],
        "first_losses": losses,
        "witness": witness,
        "choice": None,
        **means,
    }


def test_losses_of_the_ranks_are_one_of_the_global_batch():
    ranks = [rank([1.0, 4.0], [0.5]), rank([3.0, 2.0], [0.5])]
    combined = combine(FieldCell("small", "torch-ddp", 2, 0), ranks)
    assert combined["losses"] == [2.0, 3.0]
    assert combined["step_ms"] == [1.0, 3.0]
    assert combined["memory_mb"] == 4.0
    ranks[1]["witness"] = [0.6]
    with pytest.raises(WorkerFailed, match="gradients were not exchanged"):
        combine(FieldCell("small", "torch-ddp", 2, 0), ranks)
    combine(FieldCell("small", "compute-torch", 2, 0), ranks)


@pytest.fixture
def field():
    facts = {"processor": "a processor", "cores": 2, "gpus": [], "jax": "0.10"}
    settings = {"device": "cpu", "devices": [2, 4], "batch_size": 64}
    return Field(
        facts,
        settings | {"repeats": 1},
        {"torch-ddp": "torch is not installed: run `pip install 'x[field]'`"},
        ["[mine]:build returned no data: random examples"],
        SAMPLES,
    )


def test_report_says_what_counts_and_why_not(field):
    console = Console(file=io.StringIO(), width=100)
    show_field(console, field)
    text = console.file.getvalue()
    assert re.search(
        r"towers +6400 +80 % +10\.00 +9\.00 +1\.00 +1\.5 s +20 ", text
    )
    assert re.search(r"\n +2 +stock-default ✗( +–){7}", text)
    assert (
        "does not count: small, 2 devices, stock-default: loss differs" in text
    )
    assert "stock-loop failed" in text
    assert "failed: small, 2 processes, stock-loop\n[bad]" in text
    flat = " ".join(text.split())
    assert "more devices than cores share them, without efficiency" in flat
    assert "in each of the first 20 steps" in flat
    assert "skipped: torch-ddp: torch is not installed: run" in flat
    assert "[mine]:build returned no data" in flat
    assert "JAX 0.10" in flat


def test_report_fits_a_narrow_terminal(field):
    console = Console(file=io.StringIO(), width=80)
    show_field(console, field)
    assert re.search(r"jax-data-parallel +8000 ", console.file.getvalue())


def test_json_has_all_that_was_measured(field, tmp_path):
    field.write(tmp_path / "field.json")
    document = json.loads((tmp_path / "field.json").read_text())
    assert document["skipped"].keys() == {"torch-ddp"}
    assert len(document["samples"]) == len(SAMPLES)
    assert document["samples"][0]["job"] == {
        "kind": "field",
        "model": "small",
        "row": "keras-tensorflow",
        "replicas": 1,
        "repeat": 0,
    }
    by_row = {result["row"]: result for result in document["field"]}
    assert list(by_row["towers"]) == [
        *("model", "devices", "row", "counts", "reason", *FIGURES, "failed")
    ]
    assert by_row["towers"]["step_ms"] == {"median": 10, "low": 10, "high": 10}


def test_chart_shows_only_rows_that_count(field, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from keras_towers.bench.charts import draw_field

    figure = draw_field(field.document())
    figure.savefig(tmp_path / "field.svg")
    texts = [text.get_text().strip() for text in figure.findobj(Text)]
    assert {"TowerStrategy", "Keras on JAX, DataParallel"} <= set(texts)
    assert texts.count("does not count") == texts.count("failed") == 1
    assert {"6400.0", "80.0", "10.0"} <= set(texts)
    assert any("global batch 64" in text for text in texts)
