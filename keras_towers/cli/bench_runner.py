"""Running benchmark workers one after another, each with a hard time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from keras_towers.cli.bench_strategies import OURS, STRATEGIES

_STDERR_LINES = 12
# A launcher needs some time to end its ranks.
_GRACE_S = 15
# TensorFlow prints these on every start, whatever happens afterwards.
_NOISE = (
    "All log messages before absl::InitializeLog",
    "oneDNN custom operations are on",
    "rebuild TensorFlow with the appropriate compiler flags",
    "This TensorFlow binary is optimized to use available CPU",
)


@dataclass(frozen=True)
class Job:
    """One measurement to make in a process of its own, or in several.

    ``towers`` is the number of processes where the kind is ``"processes"``,
    and ``strategy`` one of ``bench_rows.ROWS``.
    """

    kind: str
    model: str
    strategy: str
    towers: int
    repeat: int

    @property
    def row(self) -> tuple[str, str, int, str]:
        """What is equal for all repeats of the same measurement."""
        return (self.kind, self.model, self.towers, self.strategy)

    @property
    def title(self) -> str:
        """The row in words."""
        what = "process" if self.kind == "processes" else "tower"
        if self.towers != 1:
            what += "es" if what.endswith("s") else "s"
        return f"{self.model}, {self.towers} {what}, {self.strategy}"


@dataclass
class Sample:
    """The outcome of one job: what was measured, or why nothing was."""

    job: Job
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class WorkerFailed(Exception):
    """A worker process ended badly; the text is the end of what it said."""


def plan(
    models: list[str],
    strategies: list[str],
    towers: list[int],
    repeats: int,
    adoption: bool,
) -> list[Job]:
    """List the jobs, alternating strategies inside every repeat.

    Rows that are compared with each other run close together in time, so that
    a machine that slows down half-way slows all of them. For the same reason
    plain Keras is measured again beside every number of towers.

    Args:
        models: the models to train.
        strategies: the strategies to compare.
        towers: the numbers of towers.
        repeats: how often each is measured.
        adoption: whether adoption is timed for the strategies of ours.

    Returns:
        The jobs in the order to run them.
    """
    ordered = [name for name in STRATEGIES if name in strategies]
    jobs = [
        Job("training", model, strategy, count, repeat)
        for repeat in range(repeats)
        for model in models
        for count in towers
        for strategy in ordered
    ]
    if adoption:
        jobs += [
            Job("adoption", "adoption", strategy, count, 0)
            for count in towers
            for strategy in ordered
            if strategy in OURS
        ]
    return jobs


def run_jobs(
    jobs: list[Job],
    run: Callable[[Job], dict[str, Any]],
    announce: Callable[[Job], None],
) -> Iterator[Sample]:
    """Run the jobs in order and yield each one's sample.

    A row that failed once is not run again, so that one strategy that hangs
    does not take its time limit in every repeat.

    Args:
        jobs: what to measure.
        run: measures one.
        announce: called with each job just before it runs.

    Yields:
        The outcome of every job that was run.
    """
    failed = set()
    for job in jobs:
        if job.row in failed:
            continue
        announce(job)
        try:
            result = run(job)
        except WorkerFailed as error:
            failed.add(job.row)
            yield Sample(job, error=str(error))
        else:
            yield Sample(job, result)


def run_towers(
    job: Job, device: str, batches: int, timeout_s: float
) -> dict[str, Any]:
    """Measure towers of one process.

    Args:
        job: what to measure.
        device: ``"cpu"`` or ``"gpu"``.
        batches: how many steps to time.
        timeout_s: how many seconds it may take.

    Raises:
        WorkerFailed: it did not work.
    """
    return run_worker(_arguments(job, device, batches), timeout_s)


def _arguments(job: Job, device: str, batches: int) -> list[str]:
    options = ["--strategy", job.strategy, "--towers", str(job.towers)]
    options += ["--device", device]
    if job.kind == "adoption":
        return [*options, "--adoption"]
    return [*options, "--model", job.model, "--batches", str(batches)]


def run_worker(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """Run one worker process and return the JSON object that it prints.

    Args:
        arguments: the worker's command line.
        timeout_s: after so many seconds it is killed.

    Returns:
        What it measured.

    Raises:
        WorkerFailed: it ended with an error, ran too long or printed nothing
            that can be read.
    """
    stdout = run_python(
        ["-m", "keras_towers.cli.bench_worker", *arguments], timeout_s
    )
    try:
        return json.loads(stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise WorkerFailed("it printed no result") from None


def run_python(
    arguments: list[str],
    timeout_s: float,
    environment: dict[str, str] | None = None,
) -> str:
    """Run a Python process, whatever happens to its end.

    Args:
        arguments: what follows ``python``.
        timeout_s: after so many seconds it is ended.
        environment: more variables for it.

    Returns:
        What it printed.

    Raises:
        WorkerFailed: it ended with an error or ran too long.
    """
    # It leads a process group of its own, so that Ctrl-C reaches only this
    # process, which then ends the other and everything it started.
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            **(environment or {}),
        },
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        raise WorkerFailed(f"no result after {timeout_s:g} seconds") from None
    except BaseException:
        _end(process)
        raise
    if process.returncode != 0:
        raise WorkerFailed(_last_words(stderr, process.returncode))
    return stdout


def _end(process: subprocess.Popen[str]) -> None:
    try:
        # The ranks that a launcher started are in groups of their own: it has
        # to be asked.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _last_words(stderr: str, code: int) -> str:
    lines = [
        line
        for line in stderr.splitlines()
        if line.strip() and not any(noise in line for noise in _NOISE)
    ]
    return "\n".join([f"exit code {code}", *lines[-_STDERR_LINES:]])
