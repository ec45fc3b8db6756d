"""How much processor time tests may take: a file has what they took.

Counted are the process of pytest, the processes that it waited for, and those
that it had forked (``tests/kit/warm.py``). The time of a processor differs
between machines, and is longer where others compute beside it, so every process
of pytest measures some work of its own, too, again and again.
"""

import collections
import functools
import json
import pathlib
import resource
import statistics
import time

import pytest

from tests.kit import warm

FILE = pathlib.Path(__file__).parents[1] / "durations.json"
# The sum, or one test, that has grown by half is too long.
GROWTH = 1.5
# A test may take so much more.
SLACK_S = 5.0
# Shorter ones are not listed by name.
LISTED_S = 2.0


def cpu_seconds():
    """Processor time of this process and of those that it started."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    known = own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
    return known + warm.cpu_seconds()


def probe_seconds():
    """Processor time of some Python; a measure of this processor's speed."""
    begun = time.thread_time()
    sum(index % 7 for index in range(40_000))
    return time.thread_time() - begun


def long_before(nodeid):
    """What a test took when the file was written; 0 where that was little."""
    return _recorded().get("tests_s", {}).get(nodeid.partition("[")[0], 0)


@functools.cache
def _recorded():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


class Durations:
    """Measures tests, and compares them with the file or writes it.

    Args:
        action: "check", "write", or None to do neither.
    """

    def __init__(self, action):
        self._action = action
        self._before = cpu_seconds()
        self._taken = collections.Counter()
        self._probes = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        """Begin to count, on the process that runs the test."""
        self._before = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        """Note what a part of a test took."""
        report = yield
        now = cpu_seconds()
        report.cpu_seconds = now - self._before
        if call.when == "teardown":
            report.cpu_probe = probe_seconds()
        self._before = cpu_seconds()
        return report

    def pytest_runtest_logreport(self, report):
        """Add up, on the process that sees all tests."""
        name = report.nodeid.partition("[")[0]
        self._taken[name] += getattr(report, "cpu_seconds", 0)
        if hasattr(report, "cpu_probe"):
            self._probes.append(report.cpu_probe)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        """Write the file, or fail where something takes too long."""
        too_long = []
        if not hasattr(session.config, "workerinput"):
            if self._action == "write":
                found = json.dumps(self._found(), indent=1)
                FILE.write_text(found + "\n")
            elif self._action == "check":
                too_long = self._too_long(_recorded())
        if too_long and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        result = yield
        if too_long:
            # Last of all, as other summaries have many lines.
            print("\nTests that take too long:", *too_long, sep="\n")
        return result

    def _found(self):
        """What the file is to say."""
        taken, files = (
            {name: round(seconds, 1) for name, seconds in sorted(of.items())}
            for of in (self._taken, self._files())
        )
        return {
            "about": "processor seconds of `make test`; `make durations`",
            "probe_ms": round(1e3 * statistics.median(self._probes), 3),
            "sum_s": round(self._taken.total()),
            "files_s": files,
            "tests_s": {n: s for n, s in taken.items() if s >= LISTED_S},
        }

    def _files(self):
        files = collections.Counter()
        for name, seconds in self._taken.items():
            files[name.partition("::")[0]] += seconds
        return files

    def _too_long(self, before):
        """A line for each test, and for the sum, that has grown too much.

        What the tests of a file share is made by one of them, not always by
        the same: where one has grown, its file has to have grown, too.
        """
        slower = 1e3 * statistics.median(self._probes) / before["probe_ms"]
        slower = max(1.0, slower)
        allowed, files, found = GROWTH * slower, self._files(), []
        for name, seconds in self._taken.items():
            file = name.partition("::")[0]
            least = slower * before["files_s"].get(file, 0) + SLACK_S
            limit = allowed * before["tests_s"].get(name, LISTED_S) + SLACK_S
            if seconds > limit and files[file] > least:
                found.append(f"{name}: {seconds:.1f} s, more than {limit:.1f}")
        total, limit = self._taken.total(), allowed * before["sum_s"]
        if total > limit:
            found.append(f"all together: {total:.0f} s, more than {limit:.0f}")
        if found:
            found.append(
                "These are seconds of processor time. Make them shorter, or "
                "say why they are longer and record them: `make durations`."
            )
        return found
