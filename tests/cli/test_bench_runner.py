"""Planning the runs, and worker processes that end badly."""

import pytest

from keras_towers.cli import bench_runner
from keras_towers.cli.bench_runner import (
    Job,
    WorkerFailed,
    plan,
    run_jobs,
    run_python,
    run_towers,
    run_worker,
)


def test_strategies_alternate_inside_every_repeat():
    jobs = plan(["small"], ["towers", "plain"], [2, 4], 2, adoption=False)
    assert [(j.repeat, j.towers, j.strategy) for j in jobs] == [
        (0, 2, "plain"),
        (0, 2, "towers"),
        (0, 4, "plain"),
        (0, 4, "towers"),
        (1, 2, "plain"),
        (1, 2, "towers"),
        (1, 4, "plain"),
        (1, 4, "towers"),
    ]


def test_adoption_is_planned_once_and_only_for_ours():
    jobs = plan(["small"], ["plain", "towers"], [2, 4], 3, adoption=True)
    adoption = [job for job in jobs if job.kind == "adoption"]
    assert [(job.strategy, job.towers) for job in adoption] == [
        ("towers", 2),
        ("towers", 4),
    ]


def test_worker_that_runs_too_long_is_killed():
    with pytest.raises(WorkerFailed, match=r"no result after 0\.05 seconds"):
        run_worker(["--facts"], timeout_s=0.05)


def test_process_that_will_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(bench_runner, "_GRACE_S", 0.5)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "time.sleep(600)"
    )
    with pytest.raises(WorkerFailed, match="no result after 2 seconds"):
        run_python(["-c", deaf], timeout_s=2)


def test_worker_that_fails_leaves_its_last_words():
    with pytest.raises(WorkerFailed) as failure:
        run_worker(["--strategy", "magic"], timeout_s=120)
    assert str(failure.value).startswith("exit code 2\n")
    assert "invalid choice: 'magic'" in str(failure.value)


def test_row_that_failed_is_not_run_again(monkeypatch):
    ran = []

    def fake_worker(arguments, timeout_s):
        strategy = arguments[arguments.index("--strategy") + 1]
        ran.append(strategy)
        if strategy == "towers":
            raise WorkerFailed("exit code 1")
        return {"step_ms": [1.0]}

    monkeypatch.setattr(bench_runner, "run_worker", fake_worker)
    announced: list[Job] = []
    jobs = plan(["small"], ["plain", "towers"], [2], 3, adoption=False)

    def run(job):
        return run_towers(job, "cpu", batches=5, timeout_s=10)

    samples = list(run_jobs(jobs, run, announced.append))
    assert ran == ["plain", "towers", "plain", "plain"]
    assert [sample.error for sample in samples] == [
        None,
        "exit code 1",
        None,
        None,
    ]
    assert [job.strategy for job in announced] == ran
