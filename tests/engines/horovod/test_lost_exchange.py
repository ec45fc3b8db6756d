"""An exchange ends that begins while Horovod shuts down, and is lost."""

import subprocess
from pathlib import Path

import pytest

from tests.kit.processes import Launched

pytestmark = [pytest.mark.slow, pytest.mark.alternate(turn=1)]


def test_it_ends_with_the_error_of_the_rank_that_failed(tmp_path):
    source, preloaded = Path(__file__).with_name("hold.c"), tmp_path / "hold.so"
    command = ["cc", "-shared", "-fPIC", "-o", preloaded, source, "-ldl"]
    subprocess.run(command, check=True)
    job = Launched(
        tmp_path,
        *("-np", 2, "-m", "tests.engines.horovod.lost_exchange"),
        LD_PRELOAD=str(preloaded),
    )
    assert job.finish().code == 0, job.output
