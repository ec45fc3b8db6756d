"""The ``keras-towers`` command as a user types it."""

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

from keras_towers.cli import bench, bench_runner
from keras_towers.cli.main import app

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
        (["--processes", "2", "--device", "gpu"], "goes without --modes and"),
        (
            ["--processes", "2", "--strategies", "towers"],
            "unknown strategy 'towers'; choose compute, horovod-raw",
        ),
    ],
)
def test_wrong_argument_is_refused_in_one_line(arguments, said):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_version_names_the_package():
    result = invoke("--version")
    assert result.exit_code == 0
    assert "keras " in result.output


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

    def fake_worker(arguments, timeout_s):
        if arguments == ["--facts"]:
            return facts
        strategy = arguments[arguments.index("--strategy") + 1]
        towers = arguments[arguments.index("--towers") + 1]
        if (strategy, towers) == ("towers", "4"):
            raise bench_runner.WorkerFailed("exit code 1\nValueError: [bad]")
        return {"step_ms": [step_ms[strategy]] * 3, "epoch_cost_s": 0.25}

    monkeypatch.setattr(bench_runner, "run_worker", fake_worker)
    monkeypatch.setattr(bench, "run_worker", fake_worker)
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
    ("options", "module", "number"),
    [
        (TOWERS, "bench_worker", signal.SIGINT),
        (PROCESSES, "bench_rank", signal.SIGTERM),
    ],
)
def test_interrupt_ends_all_and_shows_what_there_is(
    tmp_path, options, module, number
):
    path = tmp_path / "bench.json"
    # An odd number, to know this test's workers from any other.
    batches = str(20_000 + os.getpid() % 1000)
    worker = (module, f"--batches {batches}")
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
    assert not running(worker)
