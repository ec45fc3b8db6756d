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
_PROBE = "cpu_probe"
_TAKEN = "cpu_seconds"


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    known = own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
    return known + warm.cpu_seconds()


def probe_seconds() -> float:
    """Processor time of some Python; a measure of this processor's speed."""
    begun = time.thread_time()
    sum(index % 7 for index in range(40_000))
    return time.thread_time() - begun


def long_before(nodeid: str) -> float:
    """What a test took when the file was written; 0 where that was little."""
    return _recorded()["tests_s"].get(nodeid.partition("[")[0], 0)


def _file(name: str) -> str:
    return name.partition("::")[0]


@functools.cache
def _recorded() -> dict:
    if not FILE.exists():
        return {"tests_s": {}}
    return json.loads(FILE.read_text())


class Durations:
    """Measures tests, and compares them with a file or writes it.

    Args:
        action: "check", "write", or None to do neither.
        file: the file.
    """

    def __init__(self, action: str | None, file: pathlib.Path = FILE):
        self._action = action
        self._file = file
        self._before = cpu_seconds()
        self.taken: dict[str, float] = collections.defaultdict(float)
        self.probes: list[float] = []

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
        setattr(report, _TAKEN, now - self._before)
        if call.when == "teardown":
            setattr(report, _PROBE, probe_seconds())
        self._before = cpu_seconds()
        return report

    def pytest_runtest_logreport(self, report):
        """Add up, on the process that sees all tests."""
        name = report.nodeid.partition("[")[0]
        self.taken[name] += getattr(report, _TAKEN, 0)
        if hasattr(report, _PROBE):
            self.probes.append(getattr(report, _PROBE))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        """Write the file, or fail where something takes too long."""
        too_long = []
        if not hasattr(session.config, "workerinput"):
            if self._action == "write":
                found = json.dumps(self.found(), indent=1)
                self._file.write_text(found + "\n")
            elif self._action == "check":
                too_long = self.too_long()
        if too_long and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        result = yield
        if too_long:
            # Last of all, as other summaries have many lines.
            print("\nTests that take too long:", *too_long, sep="\n")
        return result

    def found(self) -> dict:
        """What the file is to say."""
        listed = {
            name: round(seconds, 1)
            for name, seconds in sorted(self.taken.items())
            if seconds >= LISTED_S
        }
        return {
            "about": "processor seconds of `make test`; `make durations`",
            "probe_ms": round(1e3 * statistics.median(self.probes), 3),
            "sum_s": round(sum(self.taken.values())),
            "files_s": {
                file: round(seconds, 1)
                for file, seconds in sorted(self._files().items())
            },
            "tests_s": listed,
        }

    def _files(self) -> dict[str, float]:
        files: dict[str, float] = collections.defaultdict(float)
        for name, seconds in self.taken.items():
            files[_file(name)] += seconds
        return files

    def too_long(self) -> list[str]:
        """A line for each test, and for the sum, that has grown too much.

        What the tests of a file share is made by one of them, not always by
        the same: where one has grown, its file has to have grown, too.
        """
        file = json.loads(self._file.read_text())
        slower = 1e3 * statistics.median(self.probes) / file["probe_ms"]
        slower = max(1.0, slower)
        allowed = GROWTH * slower
        grown = {
            name
            for name, seconds in self._files().items()
            if seconds > slower * file["files_s"].get(name, 0) + SLACK_S
        }
        found = []
        for name, seconds in self.taken.items():
            before = file["tests_s"].get(name, LISTED_S)
            limit = allowed * before + SLACK_S
            if seconds > limit and _file(name) in grown:
                found.append(f"{name}: {seconds:.1f} s, more than {limit:.1f}")
        total, limit = sum(self.taken.values()), allowed * file["sum_s"]
        if total > limit:
            found.append(f"all together: {total:.0f} s, more than {limit:.0f}")
        if found:
            found.append(
                "These are seconds of processor time. Make them shorter, or "
                "say why they are longer and record them: `make durations`."
            )
        return found
