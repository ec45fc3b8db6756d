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
        """Leave out the test that ended its process from those still to run.

        It would end the next process as well, and so on.
        """
        for unit in self.assigned_work[node].values():
            for test, done in unit.items():
                if not done:
                    unit[test] = True
                    super().remove_node(node)
                    return test
        return super().remove_node(node)
