"""``keras-towers bench --field``, as workers without TensorFlow answer it."""

import json

import pytest

from keras_towers.bench.field import runner
from keras_towers.cli import bench_field
from tests.bench.shared import FACTS, FIELD_RANK, invoke

TOWERS = ("--strategies", "towers")


@pytest.fixture
def machine(monkeypatch):
    """Answer for the worker processes, on as many cores as are set here."""
    facts = FACTS | {"cores": 6}

    def ranks(source, cell, stored, setting):
        if cell is None:
            return [{"parameters": 1, "note": ""}]
        # As of a worker of another version.
        other = {"witness": [[0.5]]} if cell.row == "horovod-raw" else {}
        return [FIELD_RANK | other] * cell.processes

    monkeypatch.setattr(runner, "_run", ranks)
    monkeypatch.setattr(bench_field, "machine_facts", lambda timeout_s: facts)
    monkeypatch.setattr(bench_field, "split", lambda names: (list(names), {}))
    return facts


@pytest.fixture
def field(machine, tmp_path):
    """Run the command on one model; its exit code and its results."""
    path = tmp_path / "field.json"

    def run(*arguments):
        command = ["--field", "--models", "small", "--json", str(path)]
        ended = invoke(*command, *arguments)
        assert path.exists(), ended.output
        return ended.exit_code, json.loads(path.read_text())

    return run


@pytest.mark.parametrize(
    ("cores", "batch", "devices"),
    [(6, 64, 4), (7, 63, 7), (16, 64, 8), (1, 64, 2)],
)
def test_devices_are_as_many_as_can_share_a_batch(
    machine, field, cores, batch, devices
):
    machine["cores"] = cores
    code, document = field(*TOWERS, "--batch-size", str(batch))
    assert code == 0
    assert document["settings"]["devices"] == [devices]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TOWERS, "--batch-size", "61"], "from 2 to 6 can share --batch-size"),
        ([*TOWERS, "--towers", "6"], "6 devices cannot share --batch-size 64"),
        ([*TOWERS, "--towers", "1"], "towers: it needs at least 2 devices"),
        (["--rank-batch", "8"], "cannot be combined with --rank-batch"),
        (["--chart", "a.pdf"], "writes .svg or .png, not 'a.pdf'"),
        (["--model", "mine"], "MODULE:FUNCTION, such as my_module"),
        (["--strategies", "plain"], "unknown strategy 'plain'; choo"),
    ],
)
def test_what_would_not_be_measured_is_refused(machine, arguments, said):
    result = invoke("--field", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_one_device_has_the_rows_that_need_no_more(field):
    code, document = field("--towers", "1")
    assert code == 0
    measured = {sample["job"]["row"] for sample in document["samples"]}
    assert measured == {"keras-tensorflow", "keras-torch", "keras-jax"}
    assert "at least 2 devices" in document["skipped"]["towers"]


def test_row_that_cannot_be_compared_loses_only_itself(field, tmp_path):
    pytest.importorskip("matplotlib")
    chart = tmp_path / "field.svg"
    rows = "--strategies", "horovod-raw,horovod-strategy", "--towers", "2"
    code, document = field(*rows, "--chart", str(chart))
    assert chart.read_text().startswith("<?xml")
    assert code == 1
    of = {result["row"]: result for result in document["field"]}
    assert of["horovod-raw"]["failed"]
    assert of["horovod-strategy"]["counts"]
