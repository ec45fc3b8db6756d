"""Which process of pytest-xdist runs which tests, and when."""

import functools
import pathlib
import re

from xdist.scheduler import LoadFileScheduling

# The tests of a file share something that takes long to make.
BY_FILE = (
    "tests/compatibility/test_keras_distribute.py",
    "tests/horovod/test_one_process.py",
)
# The tests of a file share jobs, each of which a process would run anew.
SHARES_JOBS = re.compile(r"^from tests\.kit\.ranks import .*\bJob\b", re.M)
# What a file imports that starts processes.
STARTS_PROCESSES = re.compile(
    r"^from tests\.(kit\.(ranks|tasks)|launching\.jobs) import ", re.M
)


class Scheduler(LoadFileScheduling):
    """Hands out functions instead of files, and lets a crash cost one test.

    All parameters of a function go to one process, which caches what they have
    in common. Functions with the most come first, so that no process is left
    with a long one at the end.

    Tests that start processes of their own go to one process of pytest-xdist
    as long as there are others: two such jobs at once would wait for each
    other's processors, and some of these tests look at the clock.
    """

    def _split_scope(self, nodeid):
        if nodeid.startswith(BY_FILE) or self._is(SHARES_JOBS, nodeid):
            return super()._split_scope(nodeid)
        return nodeid.partition("[")[0]

    def _is(self, kind, nodeid):
        file = self.config.rootpath / nodeid.partition("::")[0]
        return kind.search(_text(file)) is not None

    def _assign_work_unit(self, node):
        elsewhere = any(
            self._is(STARTS_PROCESSES, scope) and not all(unit.values())
            for other, work in self.assigned_work.items()
            if other is not node
            for scope, unit in work.items()
        )
        for scope in self.workqueue:
            if self._is(STARTS_PROCESSES, scope) != elsewhere:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)

    def remove_node(self, node):
        """Take back the tests that a process has not run before it ended.

        The test that ended it is left out: it would end the next process, too.
        So is a function whose tests have all run: xdist would wait for ever for
        a process that was handed nothing else.
        """
        work = self.assigned_work[node]
        left = [
            (unit, test)
            for unit in work.values()
            for test, done in unit.items()
            if not done
        ]
        if left:
            unit, crashed = left[0]
            unit[crashed] = True
        for scope in [s for s, unit in work.items() if all(unit.values())]:
            del work[scope]
        super().remove_node(node)
        return crashed if left else None

    def _reschedule(self, node):
        # Where two processes end at almost the same time, one new process is
        # ready while the other still collects; that one will ask itself.
        if node in self.registered_collections:
            super()._reschedule(node)


@functools.cache
def _text(file: pathlib.Path) -> str:
    return file.read_text()
