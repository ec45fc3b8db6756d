"""Processes of a job that no launcher of this package starts."""

import contextlib
import subprocess
import sys

from keras_towers.launching.job import local_cluster
from keras_towers.rendezvous import tf_config
from tests.kit.scripts import inherited
from tests.launching.jobs import LIMIT_S, wait_until


class Task:
    """A process that a test can stop or kill.

    Args:
        command: its words.
        output: a file for what it writes.
        folder: where it runs; None: where this process does.
        **variables: of its environment.
    """

    def __init__(self, command, output, folder=None, **variables):
        self._output = output
        with output.open("wb") as stream:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env={**inherited(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self):
        """What it has written so far."""
        return self._output.read_text()

    def wait_for(self, text):
        """Wait until it has written something."""
        wait_until(
            lambda: text in self.output or self.process.poll() is not None
        )
        # It may have written it before it ended.
        code = self.process.returncode
        assert text in self.output, f"{code}: {text!r}\n{self.output}"

    def end(self):
        """Wait for its end; the exit code."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"has not ended\n{self.output}") from None

    def kill(self):
        """Kill it, if it runs."""
        self.process.kill()
        self.process.wait()


class Tasks(contextlib.ExitStack):
    """Tasks, all of which end with the block.

    Args:
        folder: for scripts and output.
    """

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        self._started = []

    def cluster(self, **sizes):
        """A cluster as each of its tasks sees it; its ports are held."""
        return self.enter_context(local_cluster(sizes))

    def start(self, cluster, script, name=None):
        """Start a script as a task of a cluster.

        Args:
            cluster: the cluster, as the task sees it.
            script: the source of what it runs.
            name: of its files; given where a task is started again.
        """
        name = name or f"{cluster.role}-{cluster.index}"
        path = self._folder / f"{name}.py"
        path.write_text(script)
        told = {tf_config.VARIABLE: cluster.to_json()}
        return self.run(sys.executable, "-u", path, name=name, **told)

    def run(self, *command, name=None, **options):
        """Start a command; the options are those of ``Task``."""
        name = name or f"task-{len(self._started)}"
        task = Task(command, self._folder / f"{name}.txt", **options)
        self.callback(task.kill)
        self._started.append(task)
        return task

    def end(self):
        """Wait until all have ended well."""
        for task in self._started:
            assert task.end() == 0, task.output
