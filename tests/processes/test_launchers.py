"""Ranks that other launchers start train one model."""

import os
import shutil
import sys

import pytest

from tests.kit.scripts import parse_variables
from tests.processes import started

pytestmark = pytest.mark.slow
RANKS = 2
MEETS = {"KERAS_TOWERS_RENDEZVOUS_TIMEOUT": "60"}


def of_slurm(rank):
    return parse_variables(
        f"SLURM_JOB_ID={os.getpid()} SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1"
        f" SLURM_STEP_NUM_TASKS={RANKS} SLURM_PROCID={rank}"
    )


def of_torchrun(rank):
    return parse_variables(
        f"TORCHELASTIC_RUN_ID={os.getpid()} MASTER_ADDR=127.0.0.1"
        f" MASTER_PORT=29400 RANK={rank} WORLD_SIZE={RANKS}"
        f" LOCAL_RANK={rank} LOCAL_WORLD_SIZE={RANKS}"
    )


def trains(folder):
    module = "-m", "tests.processes.started"
    return sys.executable, *module, folder, "HorovodStrategy"


# How ranks meet, `tests/rendezvous/test_meet.py` shows.
@pytest.mark.long
def test_two_jobs_at_once_get_the_weights_of_one_process(tasks, tmp_path):
    jobs = {tmp_path / "slurm": of_slurm, tmp_path / "torchrun": of_torchrun}
    for folder, environment in jobs.items():
        folder.mkdir()
        for rank in reversed(range(RANKS)):
            tasks.run(*trains(folder), **MEETS, **environment(rank))
    tasks.finish()
    for folder in jobs:
        started.assert_as_one_process(folder, RANKS)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_mpirun(tasks, tmp_path):
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none"]
    if os.getuid() == 0:
        mpirun.append("--allow-run-as-root")
    command = *mpirun, "-np", RANKS, *trains(tmp_path)
    tasks.run(*command, **MEETS)
    tasks.finish()
    started.assert_as_one_process(tmp_path, RANKS)
