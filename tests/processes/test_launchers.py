"""Ranks that other launchers start train one model."""

import os
import shutil
import sys

import pytest

from tests.processes import started

pytestmark = pytest.mark.slow
RANKS = 2
MEETS = {"KERAS_TOWERS_RENDEZVOUS_TIMEOUT": "60"}


def trains(folder):
    module = "-m", "tests.processes.started"
    return sys.executable, *module, folder, "HorovodStrategy"


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_mpirun(tasks, tmp_path):
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none"]
    if os.getuid() == 0:
        mpirun.append("--allow-run-as-root")
    command = *mpirun, "-np", RANKS, *trains(tmp_path)
    tasks.run(*command, **MEETS)
    tasks.finish()
    started.assert_as_one_process(tmp_path, RANKS)
