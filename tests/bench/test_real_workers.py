"""``keras-towers bench`` and the processes that it starts."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from keras_towers.bench.plan import Cell, Setting
from keras_towers.bench.runner import run_cell
from tests.kit import warm
from tests.launching.jobs import wait_until

pytestmark = pytest.mark.slow
LIMIT_S = 240
BENCH = (sys.executable, "-m", "keras_towers.cli.main", "bench")


def results_of(path, *arguments):
    """Run the command, and return what it has written."""
    done = subprocess.run(
        [*BENCH, *arguments, "--repeats", "1", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=path.parent,
        env={**os.environ, **warm.environment()},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["settings"]["complete"]
    return document


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bench.json"


def test_towers(path):
    document = results_of(
        *(path, "--models", "small", "--towers", "2", "--device", "cpu"),
        *("--strategies", "plain,towers", "--batches", "5"),
    )
    *trained, _ = document["samples"]
    assert [s["job"]["strategy"] for s in trained] == ["plain", "towers"]
    assert all(len(s["result"]["step_ms"]) == 5 for s in trained)
    # The rows may be compared because all of them compute the same thing.
    plain, ours = (s["result"]["loss"] for s in trained)
    assert ours == pytest.approx(plain, rel=1e-4)
    (adoption,) = document["adoption"]
    assert 95 < adoption["megabytes"] < 105


MINE = """
import keras

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
"""


def test_field(path):
    path.with_name("mine.py").write_text(MINE)
    document = results_of(
        *(path, "--field", "--model", "mine:build", "--towers", "2"),
        *("--device", "cpu", "--strategies", "towers", "--batches", "5"),
        *("--timeout", "90"),
    )
    measured = [sample["job"]["row"] for sample in document["samples"]]
    assert measured == ["keras-tensorflow", "towers", "compute-tensorflow"]
    losses = [sample["result"]["losses"] for sample in document["samples"]]
    assert [len(curve) for curve in losses] == [20] * 3
    reference, ours, alone = losses
    assert reference[0] > reference[-1]
    assert ours == pytest.approx(reference, rel=1e-4)
    # What exchanges nothing would not count.
    assert alone != pytest.approx(reference, rel=1e-3)
    for result in document["field"]:
        assert result["counts"], result["reason"]
        assert result["first_step_s"]["median"] > 0
        assert result["examples_per_s"]["median"] > 0


@pytest.mark.long
def test_processes(path):
    rows = ["compute", "horovod-raw", "strategy"]
    document = results_of(
        *(path, "--processes", "2", "--models", "small", "--batches", "5"),
        *("--strategies", ",".join(rows), "--timeout", "60"),
    )
    assert [row["row"] for row in document["processes"]] == rows
    results = [sample["result"] for sample in document["samples"]]
    assert [len(result["step_ms"]) for result in results] == [10] * 3
    # Rows may be compared because they train the same model on the same data.
    losses = [result["loss"] for result in results]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("row", "timeout_s", "begin", "end"),
    [
        ("plain", 0.05, "no result after 0.05 seconds", "seconds"),
        ("magic", 120, "exit code 1\n", "KeyError: 'magic'"),
    ],
)
def test_worker_that_fails_leaves_its_last_words(
    row, timeout_s, begin, end, forked_processes
):
    cell = Cell("training", "small", row, 2, 0)
    sample = run_cell(cell, Setting("cpu", 64, 5, timeout_s))
    assert sample.result == {}
    assert sample.error.startswith(begin)
    assert sample.error.endswith(end)


def running(words):
    """Whether a process's command line contains all the words."""
    processes = psutil.process_iter(["cmdline"])
    lines = [" ".join(process.info["cmdline"] or ()) for process in processes]
    return any(all(word in line for word in words) for line in lines)


TOWERS = ("--strategies", "plain", "--towers", "2", "--device", "cpu")
PROCESSES = ("--strategies", "compute", "--processes", "2")


@pytest.mark.parametrize(
    ("options", "number", "forked"),
    [
        pytest.param(TOWERS, signal.SIGINT, False, marks=pytest.mark.long),
        (PROCESSES, signal.SIGTERM, True),
    ],
)
def test_interrupt_ends_all_and_shows_what_there_is(
    path, options, number, forked, ctrl_c
):
    # An odd number, to know this test's workers from any other.
    batches = str(20_000 + os.getpid() % 1000)
    worker = ("keras_towers.bench.worker", f'"batches": {batches}')
    command = [*BENCH, "--models", "small", "--batches", batches]
    process = subprocess.Popen(
        [*command, "--json", str(path), *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **warm.environment(forked)},
    )
    try:
        assert wait_until(lambda: running(worker), LIMIT_S)
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted: 0 of 3 runs made." in output
    assert not json.loads(path.read_text())["settings"]["complete"]
    # A launcher that was only just starting ends a moment later.
    assert wait_until(lambda: not running(worker), LIMIT_S)
