"""Ranks that other launchers start train one model."""

import os
import shutil

import pytest

from tests.processes import started
from tests.processes.by_hand import ByHand

pytestmark = pytest.mark.slow
RANKS = 2
MEETS = {"KERAS_TOWERS_RENDEZVOUS_TIMEOUT": "60"}


def of_slurm(rank):
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(RANKS),
        "SLURM_PROCID": str(rank),
    }


def of_torchrun(rank):
    return {
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
    }


@pytest.fixture
def by_hand():
    with ByHand() as processes:
        yield processes


def trains(folder):
    return "tests.processes.started", folder, "HorovodStrategy"


def test_two_jobs_at_once_get_the_weights_of_one_process(by_hand, tmp_path):
    jobs = {tmp_path / "slurm": of_slurm, tmp_path / "torchrun": of_torchrun}
    for folder, variables in jobs.items():
        folder.mkdir()
        for rank in reversed(range(RANKS)):
            by_hand.start(*trains(folder), **MEETS, **variables(rank))
    by_hand.end()
    for folder in jobs:
        started.assert_as_one_process(folder, RANKS)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_mpirun(by_hand, tmp_path):
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none"]
    if os.getuid() == 0:
        mpirun.append("--allow-run-as-root")
    before = *mpirun, "-np", str(RANKS)
    by_hand.start(*trains(tmp_path), before=before, warm=False, **MEETS)
    by_hand.end()
    started.assert_as_one_process(tmp_path, RANKS)
