"""Which process of pytest-xdist runs which tests, and when."""

import functools
import re

from xdist.scheduler import LoadScopeScheduling

# The tests of a file share something that takes long to make.
BY_FILE = (
    "tests/compatibility/test_keras_distribute.py",
    "tests/engines/horovod/test_one_process.py",
    "tests/test_what_is_printed.py",
)
# The tests of a file share jobs, each of which a process would run anew.
SHARES_JOBS = re.compile(r"^from tests\.kit\.ranks import .*\bJob\b", re.M)


class Scheduler(LoadScopeScheduling):
    """Hands out functions, as they come, and lets a crash cost one test.

    All parameters of a function go to one process, which caches what they have
    in common; so do the tests of a file that share a job.
    """

    def __init__(self, config, log):
        # Not the scopes with the most tests first: those that take longest are
        # (``tests/conftest.py``).
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        if file in BY_FILE or SHARES_JOBS.search(_text(self._root / file)):
            return file
        return nodeid.partition("[")[0]

    @property
    def _root(self):
        return self.config.rootpath

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
def _text(file):
    return file.read_text()
