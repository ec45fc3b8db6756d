"""Checks that every rank of a job runs, and their results.

A worker is a module with functions marked by ``check``, which ends in
``main()``. A test file runs it once and has a test for each check::

    JOB = Job("tests.processes.training", ranks=2, limit_s=300)


    @pytest.mark.parametrize("name", names("tests.processes.training"))
    def test_two_ranks(name):
        JOB.assert_passed(name)

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

from keras_towers.rendezvous import tf_config
from tests.launching.jobs import Launched

CHECKS = {}


def check(function):
    """Make a function a check, named as it is."""
    assert function.__name__ not in CHECKS, function.__name__
    CHECKS[function.__name__] = function
    return function


def names(module):
    """The checks of a worker's module, without running it."""
    spec = importlib.util.find_spec(module)
    source = pathlib.Path(spec.origin).read_text()
    return tuple(
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
    )


def main():
    """Run the checks that the command line names, or all of them."""
    folder, limit_s, *wanted = sys.argv[1:]
    # The launcher may be gone: no rank outlives its time limit.
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    # Imports TensorFlow, as a file of tests that only asks for names need not.
    from tests.kit import untuned

    untuned.leave_untuned()
    with _results(folder, rank_here()).open("a") as file:
        for name in wanted or CHECKS:
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
        wanted: the checks to run; all where there are none.
        options: of the launcher.
        **variables: of the environment.
    """

    def __init__(
        self,
        module,
        ranks,
        limit_s,
        wanted=(),
        options=(),
        number="-np",
        **variables,
    ):
        self.ranks, self._limit_s = ranks, limit_s
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
        """Assert that a check passed on every rank."""
        found, done = self._run
        for rank, results in enumerate(found):
            result = results.get(name, "was not reached")
            assert result == "passed", (
                f"rank {rank}: {result}\n{done.out[-3000:]}{done.err[-3000:]}"
            )

    def assert_ended_well(self):
        """Assert that the launcher ended without an error."""
        _, done = self._run
        assert done.code == 0, done.out[-3000:] + done.err[-3000:]
