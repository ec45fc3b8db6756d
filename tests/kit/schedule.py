"""Which process of pytest-xdist runs which tests, and when."""

from xdist.scheduler import LoadFileScheduling

# Their tests share what takes long to make.
BY_FILE = (
    "tests/compatibility/test_keras_distribute.py",
    "tests/horovod/test_one_process.py",
    "tests/horovod/test_two_ranks.py",
    "tests/processes/test_two_ranks.py",
)


class Scheduler(LoadFileScheduling):
    """Gives out functions in place of files, and lets a crash cost one test.

    All parameters of a function go to one process, which keeps what they have
    in common. Those with the most come first, so that no process is left alone
    with one at the end.
    """

    def _split_scope(self, nodeid):
        if nodeid.startswith(BY_FILE):
            return super()._split_scope(nodeid)
        return nodeid.partition("[")[0]

    def remove_node(self, node):
        """Take back what a process that has ended was given and has not run.

        The test that ended it is not among that, or it would end the next
        process as well, and so on. Neither is what has run: xdist would wait
        without end for a process that was given no more than that.
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
