"""Processes of a job that no launcher of this package knows of."""

import os
import subprocess
import sys

from tests.kit.scripts import inherited
from tests.kit.warm import environment
from tests.launching.jobs import ROOT

LIMIT_S = 100


class ByHand:
    """Starts processes, none of which outlives the block."""

    def __enter__(self):
        self._processes = []
        return self

    def start(self, *command, before=(), warm=True, **variables):
        """Start a module with arguments, by way of another command."""
        module = sys.executable, "-m", *command
        self.run(*before, *module, warm=warm, **variables)

    def run(self, *command, folder=None, warm=True, **variables):
        """Start a command, in a folder."""
        path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
        self._processes.append(
            subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env={
                    **inherited(),
                    **environment(warm),
                    "PYTHONPATH": path,
                    **variables,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def end(self, code=0):
        """Wait until all have ended, with an exit code; what they have said."""
        said = [one.communicate(timeout=LIMIT_S)[0] for one in self._processes]
        found = [one.returncode for one in self._processes]
        assert found == [code] * len(found), said
        return said

    def __exit__(self, *error):
        for one in self._processes:
            one.kill()
            one.communicate()
