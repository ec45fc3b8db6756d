"""``keras-towers bench`` as a user types it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keras_towers.bench import runner
from keras_towers.cli import bench
from keras_towers.cli.main import app
from keras_towers.errors import TowerError

LIMIT_S = 240


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "huge"], "unknown model 'huge'; choose small, large"),
        (["--strategies", "plain,magic"], "unknown strategy 'magic'; choose"),
        (["--modes", "fast"], "unknown mode 'fast'; choose cpu, gpu"),
        (["--models", ","], "no model given; choose small, large, cnn"),
        (["--towers", "two"], "whole numbers from 1, not 'two'"),
        (["--towers", "0,2"], "whole numbers from 1, not '0,2'"),
        (["--json", "/no/such/folder/a.json"], "there is no folder /no/such"),
        (["--processes", "1,2"], "whole numbers from 2, not '1,2'"),
        (
            ["--processes", "2", "--device", "gpu"],
            "cannot be combined with --modes",
        ),
        (
            ["--processes", "2", "--strategies", "towers"],
            "unknown strategy 'towers'; choose compute, horovod-raw",
        ),
        (["--json", "."], ". is a folder; name a file in it"),
        (["--rank-batch", "8"], "--rank-batch needs --processes"),
        (["--model", "mine:build"], "--model needs --field"),
        (["--chart", "a.svg"], "--chart needs --field"),
        (
            ["--field", "--processes", "2"],
            "cannot be combined with --processes",
        ),
        (["--field", "--model", "mine"], "MODULE:FUNCTION, such as my_module"),
        (["--field", "--chart", "a.pdf"], "writes .svg or .png, not 'a.pdf'"),
        (
            ["--field", "--strategies", "plain"],
            "unknown strategy 'plain'; choo",
        ),
        (["--field", "--towers", "0"], "whole numbers from 1, not '0'"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(arguments, said):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_help_describes_every_option():
    result = invoke("bench", "--help")
    assert result.exit_code == 0
    for option in ("--models", "--towers", "--processes", "--json"):
        assert option in result.output


@pytest.fixture
def fake_workers(monkeypatch):
    """Answer for the worker processes; ``towers`` fails on four towers."""
    facts = {
        "tensorflow": "2.21.0",
        "keras": "3.15.1",
        "python": "3.13.0",
        "platform": "Linux",
        "processor": "a processor",
        "cores": 2,
        "gpus": [],
    }
    step_ms = {"plain": 2.0, "stock-default": 8.0, "towers": 4.0}

    def fake_cell(cell, setting):
        if (cell.row, cell.replicas) == ("towers", 4):
            raise runner.WorkerFailed("exit code 1\nValueError: [bad]")
        return {"step_ms": [step_ms[cell.row]] * 3, "epoch_cost_s": 0.25}

    monkeypatch.setattr(runner, "_run_cell", fake_cell)
    monkeypatch.setattr(bench, "machine_facts", lambda timeout_s: facts)
    return facts


COMPARED = ("--models", "small", "--strategies", "plain,stock-default,towers")


def test_table_shows_ratios(fake_workers):
    result = invoke("bench", *COMPARED, "--towers", "2", "--no-adoption")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    row = next(line for line in lines if "towers  " in line and "4.00" in line)
    assert row.split() == [
        "towers",
        "4.00",
        "2.00",
        "0.50",
        "0.50",
        "0.25",
        "s",
    ]


def test_failed_row_is_said_and_ends_in_exit_code_1(fake_workers, tmp_path):
    path = tmp_path / "bench.json"
    options = ("--towers", "2,4", "--no-adoption", "--json", str(path))
    result = invoke("bench", *COMPARED, *options)
    assert result.exit_code == 1
    assert "towers failed" in result.output
    assert "failed: small, 4 towers, towers" in result.output
    assert "ValueError: [bad]" in result.output
    document = json.loads(path.read_text())
    assert document["machine"] == fake_workers
    assert document["settings"]["complete"]
    assert len(document["samples"]) == 3 * 5 + 1
    assert sum(row["failed"] for row in document["training"]) == 1


def test_more_gpus_than_visible_are_refused(fake_workers):
    result = invoke("bench", *COMPARED, "--towers", "2", "--device", "gpu")
    assert result.exit_code == 2
    assert "2 GPUs are needed for --towers, 0 visible" in result.output


def test_machine_without_tensorflow_is_said_in_one_line(monkeypatch):
    def broken(timeout_s):
        raise TowerError("cannot start: no TensorFlow")

    monkeypatch.setattr(bench, "machine_facts", broken)
    result = invoke("bench")
    assert result.exit_code == 1
    assert result.output == "keras-towers bench: cannot start: no TensorFlow\n"


def run_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "keras_towers.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.slow
def test_tiny_benchmark_end_to_end(tmp_path):
    path = tmp_path / "bench.json"
    compared = ["plain", "stock-one-device", "towers"]
    done = run_command(
        *("bench", "--models", "small", "--towers", "2", "--device", "cpu"),
        *("--strategies", ",".join(compared), "--batches", "5"),
        *("--repeats", "1", "--json", str(path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    trained = [s for s in document["samples"] if s["job"]["kind"] == "training"]
    assert [s["job"]["strategy"] for s in trained] == compared
    assert all(len(s["result"]["step_ms"]) == 5 for s in trained)
    # The rows may be compared because all of them compute the same thing.
    losses = [s["result"]["loss"] for s in trained]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    (adoption,) = document["adoption"]
    assert 95 < adoption["megabytes"] < 105


@pytest.mark.slow
def test_tiny_field_end_to_end(tmp_path, monkeypatch):
    # It draws: tests/kit/lean.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    path, chart = tmp_path / "field.json", tmp_path / "field.svg"
    rows = ["stock-one-device", "towers"]
    done = run_command(
        *("bench", "--field", "--models", "small", "--towers", "2"),
        *("--device", "cpu", "--strategies", ",".join(rows), "--batches", "5"),
        *("--repeats", "1", "--timeout", "90"),
        *("--json", str(path), "--chart", str(chart)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["settings"]["complete"]
    measured = [sample["job"]["row"] for sample in document["samples"]]
    assert measured == ["keras-tensorflow", *rows, "compute-tensorflow"]
    losses = [sample["result"]["losses"] for sample in document["samples"]]
    assert [len(curve) for curve in losses] == [20] * 4
    assert losses[0][0] > losses[0][-1]
    # What exchanges nothing would not count.
    reference, *same, alone = losses
    assert all(curve == pytest.approx(reference, rel=1e-4) for curve in same)
    assert alone != pytest.approx(reference, rel=1e-3)
    for result in document["field"]:
        assert result["counts"], result["reason"]
        assert 0 < result["first_step_s"]["median"] < 60
        assert result["examples_per_s"]["median"] > 0
    assert chart.read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.long
def test_tiny_benchmark_of_two_processes(tmp_path):
    path = tmp_path / "bench.json"
    rows = ["compute", "horovod-raw", "strategy"]
    done = run_command(
        *("bench", "--processes", "2", "--models", "small", "--batches", "5"),
        *("--strategies", ",".join(rows), "--repeats", "1"),
        *("--timeout", "60", "--json", str(path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert [row["row"] for row in document["processes"]] == rows
    results = [sample["result"] for sample in document["samples"]]
    assert [len(result["step_ms"]) for result in results] == [10] * 3
    # Rows may be compared because they train the same model on the same data.
    losses = [result["loss"] for result in results]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != losses[1]


def running(words):
    """Return the command lines of processes that contain all the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = (
                path.read_bytes().replace(b"\0", b" ").decode(errors="ignore")
            )
            if all(word in line for word in words):
                found.append(line)
    return found


TOWERS = ("--strategies", "plain", "--towers", "2", "--device", "cpu")
PROCESSES = ("--strategies", "compute", "--processes", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "number"),
    [(TOWERS, signal.SIGINT), (PROCESSES, signal.SIGTERM)],
)
def test_interrupt_ends_all_and_shows_what_there_is(tmp_path, options, number):
    path = tmp_path / "bench.json"
    # An odd number, to know this test's workers from any other.
    batches = str(20_000 + os.getpid() % 1000)
    worker = ("keras_towers.bench.worker", f'"batches": {batches}')
    command = [sys.executable, "-m", "keras_towers.cli.main", "bench"]
    command += ["--models", "small", "--batches", batches, "--json", str(path)]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        text=True,
        # A test run in the background may have been told to ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted: 0 of 3 runs made." in output
    assert not json.loads(path.read_text())["settings"]["complete"]
    # A launcher that was only just starting ends a moment later.
    deadline = time.monotonic() + LIMIT_S
    while running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(worker)
