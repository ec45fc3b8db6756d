"""Processes of Python that a test starts as a user would, alone.

The tests may be run by a launcher or a manager of a cluster; nothing in a test
is to see what those set for the processes that they start.
"""

import os
import subprocess
import sys
from pathlib import Path

from keras_towers.jobs.rendezvous.launchers import LAUNCHERS

ROOT = Path(__file__).parents[2]
_RANKS = {launcher.rank_in for launcher in LAUNCHERS}
_OF_LAUNCHERS = (
    *("HOROVOD_", "SLURM", "OMPI_", "PMI_", "PMIX_", "I_MPI_", "PBS_", "LSB_"),
    *("TORCHELASTIC_", "DMLC_", "BYTEPS_", "TF_CONFIG", "TF_NUM_", "OMP_"),
    *("WORLD_SIZE", "LOCAL_RANK"),
)


def inherited():
    """The environment without what a launcher has set."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _RANKS and not name.startswith(_OF_LAUNCHERS)
    }


def forget_launchers():
    """Leave nothing of launchers in the environment."""
    for name in os.environ.keys() - inherited():
        del os.environ[name]


def parse_variables(text):
    """Variables of the environment, as a shell would set them."""
    return dict(word.split("=", 1) for word in text.split())


def write_executable(path, text):
    """Write a program that a shell runs."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run_python(*command, folder=ROOT, limit_s=200, **variables):
    """Run Python with some arguments, no part of any job.

    Args:
        *command: ``"-c", code`` or ``"-m", module`` or a file, with arguments.
        folder: where it runs.
        limit_s: seconds after which it is killed.
        **variables: of its environment.
    """
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**inherited(), **variables},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
