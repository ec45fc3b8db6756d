"""``keras-towers bench`` as a user types it, with workers that are faked."""

import json

import pytest

from keras_towers.bench import runner
from keras_towers.cli import bench
from tests.bench.shared import FACTS, invoke


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch):
    """Answer for the worker processes; ``towers`` fails on four towers."""

    def fake_cell(cell, setting):
        if (cell.row, cell.replicas) == ("towers", 4):
            raise runner.WorkerFailed("exit code 1\nValueError: [bad]")
        return {"step_ms": [2.0] * 3, "epoch_cost_s": 0.25}

    monkeypatch.setattr(runner, "_run_cell", fake_cell)
    monkeypatch.setattr(bench, "machine_facts", lambda timeout_s: FACTS)


PROCESSES = ["--processes", "2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "huge"], "unknown model 'huge'; choose small, large"),
        (["--strategies", "plain,magic"], "unknown strategy 'magic'; choose"),
        (["--modes", "fast"], "unknown mode 'fast'; choose cpu, gpu"),
        (["--models", ","], "no model given; choose small, large, cnn"),
        (["--towers", "two"], "whole numbers from 1, not 'two'"),
        (["--towers", "2", "--device", "gpu"], "2 GPUs are needed for --tow"),
        (["--json", "/no/such/folder/a.json"], "there is no folder /no/such"),
        (["--processes", "1,2"], "whole numbers from 2, not '1,2'"),
        ([*PROCESSES, "--device", "gpu"], "cannot be combined with --modes"),
        ([*PROCESSES, "--strategies", "towers"], "unknown strategy 'towers'"),
        (["--rank-batch", "8"], "--rank-batch needs --processes"),
        (["--model", "mine:build"], "--model needs --field"),
        (["--chart", "a.svg"], "--chart needs --field"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_failed_row_is_said_and_ends_in_exit_code_1(tmp_path):
    path = tmp_path / "bench.json"
    result = invoke(
        *("--models", "small", "--strategies", "plain,stock-default,towers"),
        *("--towers", "2,4", "--no-adoption", "--json", str(path)),
    )
    assert result.exit_code == 1
    assert "towers failed" in result.output
    assert "failed: small, 4 towers, towers" in result.output
    assert "ValueError: [bad]" in result.output
    document = json.loads(path.read_text())
    assert document["machine"] == FACTS
    assert document["settings"]["complete"]
    # Three repeats of all, but for what has failed before.
    assert len(document["samples"]) == 3 * 5 + 1
    assert sum(row["failed"] for row in document["training"]) == 1
