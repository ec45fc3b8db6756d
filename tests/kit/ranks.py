"""Checks that every rank of a job runs, and their results.

A worker is a module with functions marked by ``check``, which ends in
``main()``. A test file runs it once and has a test for each check::

    WORKER = "tests.processes.training"
    JOB = Job(WORKER, ranks=2, limit_s=300, wanted=names(WORKER))


    @pytest.mark.parametrize("job, name", cases({"Horovod": JOB}))
    def test_ranks(job, name):
        job.assert_passed(name)

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

from keras_towers.rendezvous import tf_config
from tests.launching.jobs import Launched

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
            except Exception:
                result = traceback.format_exc()
            print(json.dumps([name, result]), file=file, flush=True)
            untuned.search_no_more()


def rank_here():
    """The rank of this process, however the launcher has told it."""
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
        ranks: how many.
        limit_s: seconds after which the job is ended.
        number: the launcher's option for the number of ranks.
        wanted: the checks to run.
        options: of the launcher.
        **variables: of the environment.
    """

    def __init__(
        self,
        module,
        ranks,
        limit_s,
        wanted,
        options=(),
        number="-np",
        **variables,
    ):
        self.ranks, self.wanted, self._limit_s = ranks, wanted, limit_s
        self._before = number, str(ranks), *options, "-m", module
        self._after = str(limit_s), *wanted
        self._environment = variables

    @functools.cached_property
    def _run(self):
        with tempfile.TemporaryDirectory() as folder:
            arguments = *self._before, folder, *self._after
            job = Launched(pathlib.Path(folder), arguments, **self._environment)
            done = job.finish(self._limit_s + 5)
            ranks = range(self.ranks)
            return [_read(_results(folder, rank)) for rank in ranks], done

    def assert_passed(self, name):
        """Assert that a check passed on every rank, or how the job ended."""
        found, done = self._run
        if name == ENDS_WELL:
            assert done.code == 0, done.out[-3000:] + done.err[-3000:]
            return
        for rank, results in enumerate(found):
            result = results.get(name, "was not reached")
            assert result == "passed", (
                f"rank {rank}: {result}\n{done.out[-3000:]}{done.err[-3000:]}"
            )


def cases(jobs, marks=()):
    """Cases of pytest: each check of each job, and that it ends well.

    Args:
        jobs: by their names.
        marks: of all these cases.
    """
    return [
        pytest.param(job, name, id=f"{label}-{name}", marks=marks)
        for label, job in jobs.items()
        for name in (*job.wanted, ENDS_WELL)
    ]
