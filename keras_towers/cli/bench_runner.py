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
# TensorFlow prints these on every start, whatever happens afterwards.
_NOISE = (
    "All log messages before absl::InitializeLog",
    "oneDNN custom operations are on",
    "rebuild TensorFlow with the appropriate compiler flags",
    "This TensorFlow binary is optimized to use available CPU",
)


@dataclass(frozen=True)
class Job:
    """One measurement to make in a process of its own."""

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
        plural = "" if self.towers == 1 else "s"
        return f"{self.model}, {self.towers} tower{plural}, {self.strategy}"


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
    device: str,
    batches: int,
    timeout_s: float,
    announce: Callable[[Job], None],
) -> Iterator[Sample]:
    """Run the jobs in order and yield each one's sample.

    A row that failed once is not run again, so that one strategy that hangs
    does not take its time limit in every repeat.

    Args:
        jobs: what to measure.
        device: ``"cpu"`` or ``"gpu"``.
        batches: how many steps to time in a run.
        timeout_s: how many seconds a run may take.
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
            result = run_worker(_arguments(job, device, batches), timeout_s)
        except WorkerFailed as error:
            failed.add(job.row)
            yield Sample(job, error=str(error))
        else:
            yield Sample(job, result)


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
    # The worker leads a process group of its own, so that Ctrl-C reaches only
    # this process, which then ends the worker and everything it started.
    process = subprocess.Popen(
        [sys.executable, "-m", "keras_towers.cli.bench_worker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
        },
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise WorkerFailed(f"no result after {timeout_s:g} seconds") from None
    except BaseException:
        _kill(process)
        raise
    if process.returncode != 0:
        raise WorkerFailed(_last_words(stderr, process.returncode))
    try:
        return json.loads(stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise WorkerFailed("it printed no result") from None


def _kill(process: subprocess.Popen[str]) -> None:
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
