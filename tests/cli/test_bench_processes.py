"""The benchmark of several processes."""

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from keras_towers.cli import bench_processes, bench_rows
from keras_towers.cli.bench_meeting import Meeting
from keras_towers.cli.bench_models import MODELS
from keras_towers.cli.bench_process_report import show_processes
from keras_towers.cli.bench_process_summary import summarize_processes
from keras_towers.cli.bench_processes import combine, plan_processes
from keras_towers.cli.bench_rank import measure
from keras_towers.cli.bench_runner import Job, Sample, WorkerFailed
from keras_towers.cli.bench_summary import Spread
from keras_towers.cli.bench_trainers import Share, Times
from keras_towers.errors import TowerError
from keras_towers.reduction import compression


def sample(row, repeat, ms, processes=2, error=None, **more):
    job = Job("processes", "large", row, processes, repeat)
    result = {"step_ms": [ms], "epoch_cost_s": 0.1, "loss": 1.0, **more}
    return Sample(job, {} if error else result, error)


def summarized(*samples):
    return {row.row: row for row in summarize_processes(samples)}


def test_rows_name_every_compression_there_is():
    with pytest.raises(TowerError) as error:
        compression.resolve("?")
    listed = str(error.value).partition("one of ")[2]
    assert re.findall(r"'([\w-]+)'", listed) == list(bench_rows.COMPRESSIONS)


def test_rows_alternate_inside_every_repeat():
    jobs = plan_processes(["large"], ["strategy", "compute"], [2, 4], 2)
    assert [(job.repeat, job.towers, job.strategy) for job in jobs] == [
        (repeat, count, row)
        for repeat in (0, 1)
        for count in (2, 4)
        for row in ("compute", "strategy")
    ]
    assert jobs[0].title == "large, 2 processes, compute"


def test_torch_is_a_row_only_where_it_is_installed(monkeypatch):
    find = {"torch": None}.get
    monkeypatch.setattr(bench_processes.importlib.util, "find_spec", find)
    assert bench_processes.default_rows() == [
        row for row in bench_rows.ROWS if not row.startswith("torch")
    ]


def test_cost_is_above_compute_of_the_same_repeat():
    rows = summarized(
        sample("compute", 0, 10.0),
        sample("horovod-raw", 0, 30.0),
        sample("strategy", 0, 15.0, how="shared memory"),
        sample("compute", 1, 20.0),
        sample("horovod-raw", 1, 30.0),
        sample("strategy", 1, 22.0, how="shared memory"),
    )
    assert rows["compute"].cost_ms is None
    assert rows["compute"].to_raw is None
    assert rows["horovod-raw"].cost_ms == Spread(15.0, 10.0, 20.0)
    assert rows["strategy"].step_ms == Spread(18.5, 15.0, 22.0)
    assert rows["strategy"].cost_ms == Spread(3.5, 2.0, 5.0)
    assert rows["strategy"].to_raw == Spread(0.225, 0.2, 0.25)
    assert rows["strategy"].how == "shared memory"


def test_torch_is_compared_with_torch():
    rows = summarized(
        sample("compute", 0, 10.0),
        sample("horovod-raw", 0, 14.0),
        sample("torch-compute", 0, 20.0, epoch_cost_s=None),
        sample("torch-ddp", 0, 26.0, epoch_cost_s=None),
    )
    assert rows["torch-compute"].cost_ms is None
    assert rows["torch-ddp"].cost_ms == Spread(6.0, 6.0, 6.0)
    assert rows["torch-ddp"].to_raw == Spread(1.5, 1.5, 1.5)
    assert rows["torch-ddp"].epoch_cost_s is None


def test_nothing_is_divided_by_a_cost_that_noise_hides():
    rows = summarized(
        sample("compute", 0, 10.0),
        sample("horovod-raw", 0, 9.0),
        sample("strategy", 0, 12.0),
    )
    assert rows["strategy"].cost_ms == Spread(2.0, 2.0, 2.0)
    assert rows["strategy"].to_raw is None


def test_rows_of_other_numbers_of_processes_are_not_compared():
    rows = summarized(
        sample("compute", 0, 10.0, processes=4), sample("strategy", 0, 12.0)
    )
    assert rows["strategy"].cost_ms is None


def test_failed_row_is_shown_as_failed():
    samples = [
        sample("compute", 0, 10.0),
        sample("strategy", 0, 12.0, how="shared memory"),
        sample("stock-loop", 0, 0, error="exit code 1"),
    ]
    console = Console(file=io.StringIO(), width=80)
    show_processes(console, summarize_processes(samples), "\n")
    text = console.file.getvalue()
    assert re.search(r"2 +compute +10\.0 +– +– +0\.10 s", text)
    assert re.search(r"strategy \(shared memory\) +12\.0 +2\.00 +–", text)
    assert re.search(r"stock-loop failed +– +– +– +–", text)
    assert "horovod-raw:" not in text


def rank(step_ms, witness, loss=1.0):
    return {
        "step_ms": step_ms,
        "epoch_cost_s": None,
        "loss": loss,
        "how": None,
        "witness": witness,
    }


def test_ranks_are_put_together():
    ranks = [rank([1.0, 2.0], [0.5], 2.0), rank([3.0], [0.5], 4.0)]
    assert combine("strategy", ranks) == {
        "step_ms": [1.0, 2.0, 3.0],
        "epoch_cost_s": None,
        "loss": 3.0,
        "how": None,
    }


@pytest.mark.parametrize("other", [0.6, float("nan")])
def test_row_that_exchanges_nothing_is_found_out(other):
    ranks = [rank([1.0], [0.5]), rank([1.0], [other])]
    with pytest.raises(WorkerFailed, match="gradients were not exchanged"):
        combine("strategy", ranks)
    assert combine("compute", ranks)["step_ms"] == [1.0, 1.0]


def test_ranks_meet_in_a_folder(tmp_path):
    first, second = (Meeting(tmp_path, rank, 2) for rank in (0, 1))
    first.leave("port", "1")
    assert not first.complete("port")
    assert second.exchange("port", "2") == ["1", "2"]
    assert first.complete("port")


class Counting:
    """Trains nothing; a second passes in every step, and three after each."""

    how = None

    def __init__(self, meeting):
        self.calls = []
        self._meeting = meeting

    def train(self, steps, epochs=1):
        self.calls.append((steps, epochs))
        if len(self.calls) == 5:
            Meeting(self._meeting.folder, 1, 2).leave("done")
        begins = [epoch * (steps + 3) for epoch in range(epochs + 1)]
        return Times([float(step) for step in range(steps)], begins, 0.5)

    def witness(self):
        return [1.0]


@pytest.mark.parametrize("alone", [True, False])
def test_rank_is_timed_while_the_others_train(tmp_path, alone):
    meeting = Meeting(tmp_path, 0, 2)
    Meeting(tmp_path, 1, 2).leave("warm")
    trained = Counting(meeting)
    result = measure(trained, meeting, batches=7, alone=alone)
    assert result["step_ms"] == [1e3] * 7
    assert result["epoch_cost_s"] == 3
    assert trained.calls[:3] == [(10, 1), (11, 1), (4, 5)]
    # Until the other one is done too, where nothing keeps the two in step.
    assert trained.calls[3:] == ([(4, 1)] * 2 if alone else [])


def test_parts_of_the_ranks_make_up_each_global_batch(tmp_path):
    shares = [
        Share(MODELS["small"], Meeting(tmp_path, rank, 2), batch=3, steps=4)
        for rank in (0, 1)
    ]
    x, y = shares[0].data()
    for step in range(4):
        parts = [share.part() for share in shares]
        mine = slice(step * 3, step * 3 + 3)
        both = slice(step * 6, step * 6 + 6)
        assert (x[both] == [*parts[0][0][mine], *parts[1][0][mine]]).all()
        assert (y[both] == [*parts[0][1][mine], *parts[1][1][mine]]).all()


@pytest.mark.parametrize("name", list(MODELS))
def test_torch_has_the_same_models(name):
    # Half a gigabyte, for the row of DDP, which is there where it is installed.
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from keras_towers.cli.bench_torch import build

    weights = [w.shape for w in MODELS[name].build().trainable_variables]
    ours = build(MODELS[name].input_shape).parameters()
    assert [sorted(shape) for shape in weights] == [
        sorted(parameter.shape) for parameter in ours
    ]


@pytest.mark.slow
def test_tiny_benchmark_of_two_processes(tmp_path):
    path = tmp_path / "bench.json"
    rows = ["compute", "horovod-raw", "strategy"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keras_towers.cli.main", "bench"),
            *("--processes", "2", "--models", "small", "--batches", "5"),
            *("--strategies", ",".join(rows), "--repeats", "1"),
            *("--timeout", "60", "--json", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
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
