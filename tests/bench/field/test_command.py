"""``keras-towers bench --field`` as a user types it."""

import json

import pytest
from typer.testing import CliRunner

from keras_towers.bench.field import runner
from keras_towers.cli import bench_field
from keras_towers.cli.main import app

LOSSES, FROZEN = [2.0, 1.0], [2.0, 2.0]


@pytest.fixture
def machine(monkeypatch):
    """Answer for the worker processes, on as many cores as are set here."""
    facts = {
        "tensorflow": "2.21.0",
        "keras": "3.15.1",
        "python": "3.13.0",
        "processor": "a processor",
        "cores": 6,
        "gpus": [],
    }

    def ranks(source, cell, stored, setting):
        if cell is None:
            return [{"parameters": 1, "note": ""}]
        one = {
            "step_ms": [1.0],
            "first_losses": LOSSES,
            "frozen_losses": FROZEN,
            "witness": [0.5],
            "first_step_s": 1.0,
            "memory_mb": 10.0,
            "epoch_cost_s": None,
            "choice": None,
        }
        # As of a worker of another version.
        other = {**one, "witness": [[0.5]]} if cell.row == "horovod-raw" else {}
        return [{**one, **other} for _ in range(cell.processes)]

    monkeypatch.setattr(runner, "_run", ranks)
    monkeypatch.setattr(bench_field, "machine_facts", lambda timeout_s: facts)
    everything = lambda names: (list(names), {})  # noqa: E731
    monkeypatch.setattr(bench_field, "split", everything)
    return facts


@pytest.fixture
def field(tmp_path):
    """Run the command on one model, and return its exit code and results."""
    path = tmp_path / "field.json"

    def run(*arguments):
        command = ["bench", "--field", "--models", "small", "--json", str(path)]
        ended = CliRunner().invoke(app, [*command, *arguments])
        assert path.exists(), ended.output
        return ended.exit_code, json.loads(path.read_text())

    return run


TOWERS = ("--strategies", "towers")


@pytest.mark.parametrize(
    ("cores", "batch", "devices"),
    [(6, 64, 4), (7, 63, 7), (3, 64, 2), (16, 64, 8), (1, 64, 2), (8, 65, 5)],
)
def test_devices_are_as_many_as_can_share_a_batch(
    machine, field, cores, batch, devices
):
    machine["cores"] = cores
    code, document = field(*TOWERS, "--batch-size", str(batch))
    assert code == 0
    assert document["settings"]["devices"] == [devices]
    assert document["settings"]["repeats"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TOWERS, "--batch-size", "61"], "from 2 to 6 can share --batch-size"),
        ([*TOWERS, "--towers", "6"], "6 devices cannot share --batch-size 64"),
        ([*TOWERS, "--towers", "1"], "towers: it needs at least 2 devices"),
        ([*TOWERS, "--towers", ""], "whole numbers from 1, not ''"),
        (["--rank-batch", "8"], "cannot be combined with --rank-batch"),
        (["--no-adoption"], "combined with --adoption or --no-adoption"),
        (["--json", "/tmp"], "/tmp is a folder; name a file in it"),
        (["--chart", "/tmp"], "/tmp is a folder; name a file in it"),
    ],
)
def test_what_would_not_be_measured_is_refused(machine, arguments, said):
    result = CliRunner().invoke(app, ["bench", "--field", *arguments])
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_one_device_has_the_rows_that_need_no_more(machine, field):
    code, document = field("--towers", "1")
    assert code == 0
    measured = {sample["job"]["row"] for sample in document["samples"]}
    assert measured == {"keras-tensorflow", "keras-torch", "keras-jax"}
    assert "at least 2 devices" in document["skipped"]["towers"]
    # Any batch will do for one.
    code, document = field("--strategies", "keras-jax", "--batch-size", "61")
    assert code == 0
    assert document["settings"]["devices"] == []


def test_row_that_cannot_be_compared_loses_only_itself(machine, field):
    rows = "horovod-raw,horovod-strategy"
    code, document = field("--strategies", rows, "--towers", "2")
    assert code == 1
    of = {result["row"]: result for result in document["field"]}
    assert of["horovod-raw"]["failed"]
    assert of["horovod-strategy"]["counts"]
    # That of all processes, beside that of the one process of others.
    assert of["horovod-strategy"]["memory_mb"]["median"] == 20
    errors = [sample["error"] for sample in document["samples"]]
    assert [error.split(":")[0] for error in errors if error] == ["TypeError"]


def test_losses_that_hardly_move_show_nothing(machine, field, monkeypatch):
    monkeypatch.setitem(globals(), "FROZEN", [2.0, 1.0 + 1e-4])
    code, document = field(*TOWERS, "--towers", "2")
    assert code == 0
    of = {result["row"]: result for result in document["field"]}
    assert of["keras-tensorflow"]["counts"]
    assert not of["towers"]["counts"]
    assert "larger learning rate" in of["towers"]["reason"]
