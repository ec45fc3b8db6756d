"""Checks that every rank of a job runs, and their results.

A worker is a module with functions marked by ``check``, which ends in
``main()``. A test file runs it once and has a test for each check::

    WORKER = "tests.processes.training"
    JOBS = {"Horovod": Job(WORKER, names(WORKER))}
    test_ranks = each_check_of(JOBS)

Each rank writes the result of a check to a file of its own at once: a rank that
hangs or dies shows where.
"""

import ast
import faulthandler
import functools
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import traceback

import pytest

from keras_towers.jobs.rendezvous import tf_config
from tests.kit.processes import Launched

CHECKS = {}
# Of a job, besides the checks of its ranks.
ENDS_WELL = "the job ends well"


def check(function):
    """Make a function a check, named as it is."""
    assert function.__name__ not in CHECKS, function.__name__
    CHECKS[function.__name__] = function
    return function


def names(*modules):
    """The checks of workers' modules, without running them."""
    paths = (importlib.util.find_spec(module).origin for module in modules)
    return tuple(
        node.name
        for path in paths
        for node in ast.parse(pathlib.Path(path).read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
    )


def main():
    """Run the checks that the command line names."""
    folder, limit_s, *wanted = sys.argv[1:]
    # The launcher may be gone: no rank outlives its time limit.
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    # Imports TensorFlow, as a file of tests that only asks for names need not.
    from tests.kit import untuned

    untuned.leave_untuned()
    with _results(folder, rank_here()).open("a") as file:
        for name in wanted:
            try:
                CHECKS[name]()
                result = "passed"
            # What pytest.raises raises is no ``Exception``.
            except (Exception, pytest.fail.Exception):
                result = traceback.format_exc()
            print(json.dumps([name, result]), file=file, flush=True)
            untuned.search_no_more()


def rank_here():
    """The rank of this process, whatever launcher has started it."""
    cluster = tf_config.from_environment()
    return cluster.rank if cluster else int(os.environ["HOROVOD_RANK"])


def _results(folder, rank):
    return pathlib.Path(folder) / f"rank-{rank}.jsonl"


def _read(path):
    text = path.read_text() if path.exists() else ""
    # A rank that was killed may have written half a line.
    whole = text[: text.rfind("\n") + 1]
    return dict(json.loads(line) for line in whole.splitlines())


class Job:
    """A worker on some ranks, run when the first of its checks is asked for.

    Args:
        module: the worker.
        wanted: the checks to run.
        ranks: how many.
        limit_s: seconds after which the job is ended.
        number: the launcher's option for the number of ranks.
        options: more of its options.
        **variables: of the environment.
    """

    def __init__(
        self,
        module,
        wanted,
        ranks=2,
        limit_s=480,
        number="-np",
        options=(),
        **variables,
    ):
        self.ranks, self.wanted, self._limit_s = ranks, wanted, limit_s
        self._launcher = number, ranks, *options, "-m", module
        self._variables = variables

    @functools.cached_property
    def _run(self):
        with tempfile.TemporaryDirectory() as folder:
            arguments = *self._launcher, folder, self._limit_s, *self.wanted
            job = Launched(pathlib.Path(folder), *arguments, **self._variables)
            job.finish(self._limit_s + 5)
            ranks = range(self.ranks)
            return [_read(_results(folder, rank)) for rank in ranks], job

    def assert_passed(self, name):
        """Assert that a check passed on every rank, or how the job ended."""
        found, job = self._run
        if name == ENDS_WELL:
            assert job.code == 0, job.out[-3000:] + job.err[-3000:]
            return
        for rank, results in enumerate(found):
            result = results.get(name, "was not reached")
            assert result == "passed", (
                f"rank {rank}: {result}\n{job.out[-3000:]}{job.err[-3000:]}"
            )


def each_check_of(jobs, long=()):
    """A test of each check of some jobs, and that each job ends well.

    Args:
        jobs: by their names.
        long: those that only ``make test-all`` runs.
    """
    cases = [
        pytest.param(job, name, id=f"{label}-{name}", marks=marks)
        for some, marks in ((jobs, ()), (dict(long), pytest.mark.long))
        for label, job in some.items()
        for name in (*job.wanted, ENDS_WELL)
    ]

    @pytest.mark.parametrize("job, name", cases)
    def test(job, name):
        job.assert_passed(name)

    return test
