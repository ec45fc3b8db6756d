"""Which process of pytest-xdist runs which tests, and when."""

from xdist.scheduler import LoadFileScheduling

# The tests of a file share something that takes long to make.
BY_FILE = (
    "tests/compatibility/test_keras_distribute.py",
    "tests/horovod/test_one_process.py",
    "tests/horovod/test_two_ranks.py",
    "tests/processes/test_multi_worker.py",
    "tests/processes/test_two_ranks.py",
)


class Scheduler(LoadFileScheduling):
    """Hands out functions instead of files, and lets a crash cost one test.

    All parameters of a function go to one process, which caches what they have
    in common. Functions with the most come first, so that no process is left
    with a long one at the end.
    """

    def _split_scope(self, nodeid):
        if nodeid.startswith(BY_FILE):
            return super()._split_scope(nodeid)
        return nodeid.partition("[")[0]

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
