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
from tests.bench.shared import FACTS, FIELD_RANK

GOOD, BAD = [2.0, 1.0], [2.0, 1.5]
REFERENCE = "keras-tensorflow"


def sample(row, devices, ms, losses=GOOD, repeat=0, still=2.0):
    cell = FieldCell("small", row, devices, repeat)
    result = {"first_step_s": 1.5, "memory_mb": 20.0, "step_ms": [ms]}
    curves = {"losses": losses, "frozen_losses": [2.0, still]}
    return FieldSample(cell, result | curves)


SAMPLES = [
    sample(REFERENCE, 1, 16.0),
    sample("keras-jax", 1, 8.0),
    sample("stock-default", 2, 20.0, BAD),
    FieldSample(FieldCell("small", "stock-loop", 2, 0), error="[bad]"),
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
    figures = {
        name: [of[key] and of[key].median for key in FIGURES]
        for name, of in rows.items()
    }
    # In the order of step, examples/s, efficiency, compute, rest and start.
    # What exchanges nothing is a divisor, and no row.
    assert figures == {
        REFERENCE: [16.0, 4000.0, None, None, None, 1.5, 20.0],
        "keras-jax": [8.0, 8000.0, None, None, None, 1.5, 20.0],
        "stock-default": [None] * 7,
        "stock-loop": [None] * 7,
        "jax-data-parallel": [8.0, 8000.0, 0.5, 5.0, 3.0, 1.5, 20.0],
        "towers": [10.0, 6400.0, 0.8, 9.0, 1.0, 1.5, 20.0],
    }
    assert rows["stock-loop"]["failed"]
    assert rows["stock-default"]["reason"].startswith("loss differs")
    # Devices that share cores have none.
    assert results_of(SAMPLES, most=1)["towers"]["efficiency"] is None


OTHER_REPEAT = [
    sample(REFERENCE, 1, 16.0, repeat=1),
    sample("towers", 2, 10.0, BAD, repeat=1),
]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "the reference failed"),
        (SAMPLES + OTHER_REPEAT, "loss differs"),
        ([sample(REFERENCE, 1, 1.0, still=1.0001)], "larger learning rate"),
    ],
)
def test_row_that_does_not_count(samples, reason):
    rows = results_of([*samples, sample("towers", 2, 10.0)])
    assert not rows["towers"]["counts"]
    assert reason in rows["towers"]["reason"]


def test_losses_of_the_ranks_are_one_of_the_global_batch():
    ranks = [
        FIELD_RANK | {"step_ms": losses[:1], "first_losses": losses}
        for losses in ([1.0, 4.0], [3.0, 2.0])
    ]
    combined = combine(FieldCell("small", "torch-ddp", 2, 0), ranks)
    assert combined["losses"] == [2.0, 3.0]
    assert combined["step_ms"] == [1.0, 3.0]
    assert combined["memory_mb"] == 20
    ranks[1]["witness"] = [0.6]
    with pytest.raises(WorkerFailed, match="gradients were not exchanged"):
        combine(FieldCell("small", "torch-ddp", 2, 0), ranks)
    combine(FieldCell("small", "compute-torch", 2, 0), ranks)


@pytest.fixture
def field():
    settings = {"device": "cpu", "devices": [2, 4], "batch_size": 64}
    skipped = {"torch-ddp": "run `pip install 'x[field]'`"}
    return Field(FACTS, settings | {"repeats": 1}, skipped, ["[note]"], SAMPLES)


def test_report_says_what_counts_and_why_not(field):
    console = Console(file=io.StringIO(), width=100)
    show_field(console, field)
    text = console.file.getvalue()
    row = r"towers +6400 +80 % +10\.00 +9\.00 +1\.00 +1\.5 s +20 "
    assert re.search(row, text)
    assert re.search(r"\n +2 +stock-default ✗( +–){7}", text)
    assert "failed: small, 2 processes, stock-loop\n[bad]" in text
    flat = " ".join(text.split())
    for said in (
        "does not count: small, 2 devices, stock-default: loss differs",
        "skipped: torch-ddp: run `pip install 'x[field]'`",
        "[note]",
    ):
        assert said in flat


def test_json_has_all_that_was_measured(field, tmp_path):
    field.write(tmp_path / "field.json")
    document = json.loads((tmp_path / "field.json").read_text())
    assert document["skipped"].keys() == {"torch-ddp"}
    assert len(document["samples"]) == len(SAMPLES)
    towers = document["field"][-1]
    assert list(towers) == [
        *("model", "devices", "row", "counts", "reason", *FIGURES, "failed")
    ]
    assert towers["step_ms"] == {"median": 10, "low": 10, "high": 10}
