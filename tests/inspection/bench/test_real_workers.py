"""``keras-towers bench`` and the processes that it starts."""

import json
import os
import signal
import sys

import psutil
import pytest

from keras_towers.inspection.bench.models import Stored
from keras_towers.inspection.bench.rows import ROWS, find_row
from keras_towers.inspection.bench.runner import Cell, Setting, run_cell
from tests.kit.processes import Process, wait_until
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.slow
LIMIT_S = 540
BENCH = (sys.executable, "-m", "keras_towers.cli.main", "bench")
# Its processes have several towers on the CPU.
IN_SHARDS = "horovod:towers=2:weights=sharded:shard_over=process"
FIELD = (sys.executable, "-m", "benchmarks.field")
# Its data can be learned, and its first kernel is large enough to be in shards.
MINE = """
import keras
import numpy as np

def build():
    layers = keras.layers.Dense(128), keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((256,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(640, 256)).astype("float32")
    return model, x, x[:, :3]
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bench.json"


@pytest.mark.alternate(turn=0)
@pytest.mark.parametrize(
    ("command", "arguments", "rows"),
    [
        (
            BENCH,
            "--models mine:build --towers 2 --device cpu --strategies tower",
            ["plain", "tower"],
        ),
        pytest.param(
            BENCH,
            "--models mine:build --processes 2 --timeout 150 "
            f"--strategies {IN_SHARDS},multi-worker",
            [IN_SHARDS, "multi-worker", "plain"],
            marks=pytest.mark.long,
        ),
        # What it plans, counts and draws is shown with faked processes.
        pytest.param(
            FIELD,
            "--models mine:build --towers 2 --timeout 150 "
            "--strategies tower,stock-loop",
            ["compute", "plain", "stock-loop", "tower"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_rows_train_the_same(path, command, arguments, rows):
    path.with_name("mine.py").write_text(MINE)
    once = "--steps", 5, "--repeats", 1, "--json", path
    done = Process((*command, *arguments.split(), *once), path.parent)
    assert done.finish(LIMIT_S).code == 0, done.output
    document = json.loads(path.read_text())
    assert document["complete"]
    losses = {
        s["cell"]["row"]: s["result"]["losses"] for s in document["samples"]
    }
    assert sorted(losses) == rows
    plain = losses["plain"]
    assert plain[0] > plain[-1]
    for row, of_row in losses.items():
        is_equal = of_row == pytest.approx(plain, rel=1e-4)
        # Its processes exchange nothing.
        assert is_equal == (row != "compute"), row
    for result in document["results"]:
        assert not result["error"]
        assert result["figures"]["first_step_s"][0] > 0
        assert result["figures"]["step_ms"][0] > 0


@pytest.mark.parametrize(
    ("row", "timeout_s", "begin", "end"),
    [
        ("plain", 0.05, "no result after 0.05 seconds", "seconds"),
        ("tower:a=1", 120, "exit code 1\n", "gather_bytes, packer."),
    ],
)
def test_worker_that_fails_leaves_its_last_words(
    row, timeout_s, begin, end, tmp_path
):
    Stored("small", tmp_path).store(10)
    cell, setting = Cell("small", row, 2, 0), Setting("cpu", 64, 5, timeout_s)
    # The command refuses an option that is wrong before a worker starts.
    known = find_row(ROWS, row.partition(":")[0])
    sample = run_cell(known, cell, setting, tmp_path)
    assert sample.result == {}
    assert sample.error.startswith(begin)
    assert sample.error.endswith(end)


def running(words):
    """Whether a process's command line contains all the words."""
    processes = psutil.process_iter(["cmdline"])
    lines = [" ".join(process.info["cmdline"] or ()) for process in processes]
    return any(all(word in line for word in words) for line in lines)


@pytest.mark.alternate(turn=3)
@pytest.mark.parametrize("number", sample_of([signal.SIGINT, signal.SIGTERM]))
def test_interrupt_ends_all_and_shows_what_there_is(path, number, ctrl_c):
    # An odd number, to know this test's workers from any other.
    steps = str(20_000 + os.getpid() % 1000)
    worker = ("keras_towers.inspection.bench.cell_process", f'"steps": {steps}')
    options = "--models small --strategies multi-worker --processes 2 --steps"
    bench = Process((*BENCH, *options.split(), steps, "--json", path))
    try:
        assert wait_until(lambda: running(worker), LIMIT_S)
        bench.process.send_signal(number)
        bench.finish(LIMIT_S)
    finally:
        bench.kill_all()
    assert bench.code == 130
    assert "Interrupted: 0 of 6 runs made." in bench.out
    assert not json.loads(path.read_text())["complete"]
    # A launcher that was only just starting ends a moment later.
    assert wait_until(lambda: not running(worker), LIMIT_S)
