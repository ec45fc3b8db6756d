"""Jobs of BytePS: how they begin and end, and what ends with them."""

import importlib.util
import socket
import sys

import psutil
import pytest

from tests.kit.processes import Launched, all_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("byteps") is None,
        reason="BytePS is not installed: make .venv/byteps-cpu",
    ),
]


def role(process: psutil.Process) -> str:
    """What BytePS takes a process for, empty where it does not."""
    try:
        if "keras_towers/jobs/agent.py" in " ".join(process.cmdline()):
            return ""
        return process.environ().get("DMLC_ROLE", "")
    except psutil.Error:
        return ""


@pytest.mark.alternate(turn=5)
def test_a_server_that_is_killed_ends_the_job(tmp_path):
    # It stands still in its third step, where rank 0 waits for it.
    job = Launched(
        tmp_path,
        *("-np", 2, "--servers", 1, "--output", tmp_path),
        *("-m", "tests.processes.faults", "sleep", "BytePSStrategy"),
    )
    job.wait_for("here it comes", tmp_path / "rank.1.txt")
    family = job.family()
    roles = {role(process): process for process in family}
    assert {"scheduler", "server", "worker"} <= roles.keys()
    roles["server"].kill()
    done = job.finish()
    assert done.code == 137, done.err
    assert "server 0 was killed by SIGKILL" in done.last
    assert "trained to the end" not in done.out
    assert all_gone(family)


@pytest.mark.long
def test_a_server_that_is_stopped_ends_the_job(tmp_path):
    """No rank is late then."""
    job = Launched(
        tmp_path,
        *("-np", 2, "--servers", 1, "--output", tmp_path),
        *("--stall-warning", 2, "--stall-shutdown", 15),
        *("-m", "tests.processes.faults", "hold", "BytePSStrategy"),
    )
    job.wait_for("here it comes", tmp_path / "rank.1.txt")
    family = job.family()
    (server,) = (one for one in family if role(one) == "server")
    server.suspend()
    (tmp_path / "go on").touch()
    done = job.finish()
    assert done.code == 75, done.err
    assert done.err.count("waits there, too.") >= 3
    assert all_gone(family)


def test_processes_that_do_not_arrive_are_an_error(tasks, tmp_path):
    # Reserves the port: only a socket that reuses addresses can listen.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        rank = tasks.run(
            *(sys.executable, "-m", "tests.processes.started", tmp_path),
            "BytePSStrategy",
            DMLC_ROLE="worker",
            DMLC_WORKER_ID="0",
            DMLC_NUM_WORKER="2",
            DMLC_NUM_SERVER="1",
            DMLC_PS_ROOT_URI="127.0.0.1",
            DMLC_PS_ROOT_PORT=str(held.getsockname()[1]),
            DMLC_NODE_HOST="127.0.0.1",
            KERAS_TOWERS_START_TIMEOUT="3",
        )
        assert rank.finish().code == 75, rank.output
    for said in "worker 0 of 2", "has waited 3 s for":
        assert said in rank.output
