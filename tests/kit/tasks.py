"""Tasks of a cluster, each a process that a test can stop or kill."""

import contextlib
import os
import subprocess
import sys

from keras_towers.launching.job import local_cluster
from keras_towers.rendezvous import tf_config
from tests.kit.warm import environment
from tests.launching.jobs import wait_until


class Task:
    """A script that runs as a task.

    Args:
        folder: for its script and output.
        cluster: the cluster, as the task sees it.
        script: the source of what it runs.
        name: of its files; given where a task is started again.
        warm: whether it begins with TensorFlow imported.
    """

    def __init__(self, folder, cluster, script, name=None, warm=True):
        name = name or f"{cluster.role}-{cluster.index}"
        path = folder / f"{name}.py"
        path.write_text(script)
        self._output = folder / f"{name}.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", path],
                env={
                    **os.environ,
                    tf_config.VARIABLE: cluster.written(),
                    **environment(warm),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self):
        """What it has written so far."""
        return self._output.read_text()

    def wait_for(self, text, limit_s=60):
        """Wait until it has written something."""
        wait_until(
            lambda: text in self.output or self.process.poll() is not None,
            limit_s,
        )
        # It may have written it before it ended.
        code = self.process.returncode
        assert text in self.output, f"{code}: {text!r}\n{self.output}"

    def end(self, limit_s=60):
        """Wait for its end; the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"has not ended\n{self.output}") from None

    def kill(self):
        """Kill it, if it runs."""
        self.process.kill()
        self.process.wait()


class Tasks(contextlib.ExitStack):
    """Clusters and their tasks, all of which end with the block.

    Args:
        folder: for scripts and output.
    """

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def cluster(self, **sizes):
        """A cluster as each of its tasks sees it; its ports are held."""
        return self.enter_context(local_cluster(sizes))

    def start(self, cluster, script, name=None):
        """Start a task."""
        task = Task(self._folder, cluster, script, name)
        self.callback(task.kill)
        return task
