"""Clusters of TensorFlow's runtime that the launcher starts."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_towers.foundation.system import handle_signals
from keras_towers.jobs.known_engines import SERVED
from keras_towers.jobs.launching.job import Job
from keras_towers.jobs.launching.rank_job import run_job
from tests.kit.processes import wait_until

BEGIN = """
import json, os, signal, sys, time
cluster = json.loads(os.environ["TF_CONFIG"])
task = cluster["task"]["type"], cluster["task"]["index"]
"""


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """Run a cluster of tasks without TensorFlow; return its exit code."""
    monkeypatch.chdir(tmp_path)

    def run_here(workers, script, **options):
        (tmp_path / "script.py").write_text(BEGIN + script)
        command = [sys.executable, "script.py"]
        hosts = {"localhost": workers}
        job = Job(command, workers, hosts, engine=SERVED, servers=1, **options)
        return run_job(job).code

    return run_here


SERVING = """
if task[0] == "ps":
    open("server", "w").write(str(os.getpid()))
    time.sleep(60)
def end(*args):
    time.sleep(1)
    os.kill(int(open("server").read()), 0)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
open(f"ready-{task[1]}", "w").close()
time.sleep(60)
"""


def test_request_to_end_is_for_the_workers(run_here, tmp_path, capsys):
    """They make backups, for which they need the server."""

    def request():
        # The script itself, and a file of each task.
        wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
        os.kill(os.getpid(), signal.SIGTERM)

    # It must not end the process that runs the tests.
    unharmed = handle_signals([signal.SIGTERM], lambda *args: None)
    with unharmed, ThreadPoolExecutor(1) as pool:
        pool.submit(request)
        assert run_here(2, SERVING) == 75
    assert (
        "start the script again to resume (exit code 75)"
        in capsys.readouterr().err
    )


def test_server_is_ended_where_workers_say_no_goodbye(
    run_here, tmp_path, capsys
):
    script = "time.sleep(60 * (task[0] == 'ps'))\nprint('done')"
    assert run_here(1, script, output=tmp_path / "logs") == 0
    assert capsys.readouterr().out == "[worker 0] done\n"
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["rank.ps.0.txt", "rank.worker.0.txt"]


def test_task_that_ends_before_it_connects_is_not_waited_for(run):
    waits = f"""{BEGIN}
from keras_towers.jobs.rendezvous import store
if task == ("worker", 0):
    store.report_connected(0)
    time.sleep(600)
"""
    done = run("--workers 2", waits)
    assert done.code == 1, done.out + done.err
    assert (
        "rank 1 ended with exit code 0 before it connected, and rank 0 waits "
        "for it" in done.last
    )
