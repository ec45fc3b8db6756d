"""Jobs of BytePS: how they begin and end, and what ends with them."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.launching.jobs import ROOT, Launched, all_gone

pytestmark = pytest.mark.slow
LIMIT_S = 90
# Within so many seconds of a process's end the job has ended.
NOTICED_S = 30
SMALL = "tests.byteps.small"


def role(process: psutil.Process) -> str:
    """What BytePS takes a process for, empty where it does not."""
    try:
        if "keras_towers/launching/agent.py" in " ".join(process.cmdline()):
            return ""
        return process.environ().get("DMLC_ROLE", "")
    except psutil.Error:
        return ""


def trains_again(folder):
    """Whether another job in this environment is right."""
    job = Launched(folder, ("-np", "2", "--servers", "1", "-m", SMALL))
    done = job.finish(LIMIT_S)
    assert done.code == 0, done.err
    return sorted(done.out.splitlines())[-2:] == [
        "[0] rank 0 of 2 is right",
        "[1] rank 1 of 2 is right",
    ]


@pytest.mark.parametrize(
    "killed", ["server", pytest.param("worker", marks=pytest.mark.long)]
)
def test_a_process_that_is_killed_ends_the_job(tmp_path, killed):
    # It stands still in its third step, where rank 0 waits for it.
    job = Launched(
        tmp_path,
        ("-np", "2", "--servers", "1", "--output", str(tmp_path))
        + ("-m", "tests.byteps.faults", "sleep", "strategy"),
    )
    job.wait_for_text(tmp_path / "rank.1.txt", "here it comes", LIMIT_S)
    family = job.family()
    roles = {role(process): process for process in family}
    assert {"scheduler", "server", "worker"} <= roles.keys()
    begun = time.monotonic()
    roles[killed].kill()
    done = job.finish(LIMIT_S)
    assert time.monotonic() - begun < NOTICED_S
    assert done.code == 137, done.err
    name = {"server": "server 0", "worker": "rank "}[killed]
    assert name in done.last and "was killed by SIGKILL" in done.last
    assert "trained to the end" not in done.out
    assert all_gone(family)
    if killed == "server":
        assert trains_again(tmp_path)


@pytest.mark.long
def test_an_exception_ends_the_job_with_its_traceback(tmp_path):
    job = Launched(
        tmp_path,
        ("-np", "2", "--servers", "1")
        + ("-m", "tests.byteps.faults", "raise", "strategy"),
    )
    done = job.finish(LIMIT_S)
    assert done.code == 1
    assert "[1] ValueError: cosmic ray in rank 1" in done.out + done.err
    assert "rank 1" in done.last


def test_a_script_that_knows_of_nothing_without_horovod(tmp_path):
    missing = tmp_path / "without" / "horovod.py"
    missing.parent.mkdir()
    missing.write_text("raise ModuleNotFoundError(name='horovod')\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import keras, numpy as np\n"
        "model = keras.Sequential([keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "x = np.ones((8, 4), 'float32')\n"
        "model.fit(x, x[:, :1], verbose=0)\n"
        "model.save('model.keras')\n"
    )
    arguments = "-np", "2", "--strategy", "byteps", str(script)
    paths = f"{missing.parent}:{ROOT}"
    job = Launched(tmp_path, arguments, PYTHONPATH=paths)
    done = job.finish(LIMIT_S)
    assert done.code == 0, done.err
    assert "BytePSStrategy: 1 tower" in done.err
    assert (tmp_path / "model.keras").exists()


def started_by_hand(role, port, **variables):
    """A process of a job that no launcher knows of."""
    command = [sys.executable, "-m", "keras_towers.launching.byteps_server"]
    if role == "worker":
        command = [sys.executable, "-m", SMALL]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DMLC_ROLE": role,
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "KERAS_TOWERS_SECRET": "of this test",
        **variables,
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_processes_started_by_hand(tmp_path, free_port):
    processes = [started_by_hand(r, free_port) for r in ("scheduler", "server")]
    processes += [
        started_by_hand("worker", free_port, DMLC_WORKER_ID=str(i))
        for i in range(2)
    ]
    try:
        said = [p.communicate(timeout=LIMIT_S)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    # Scheduler and server end with the workers.
    assert [process.returncode for process in processes] == [0] * 4, said
    assert "rank 0 of 2 is right" in said[2]
    assert "rank 1 of 2 is right" in said[3]


def test_others_that_do_not_come_are_an_error(free_port):
    worker = started_by_hand(
        *("worker", free_port),
        DMLC_WORKER_ID="0",
        KERAS_TOWERS_START_TIMEOUT="3",
    )
    try:
        said, _ = worker.communicate(timeout=LIMIT_S)
    finally:
        worker.kill()
    assert worker.returncode == 1
    assert "worker 0 of 2" in said and "has waited 3 s for" in said
