"""Jobs whose processes all start again when one is lost; --standby."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from keras_towers.foundation import settings
from tests.kit.processes import wait_until
from tests.kit.scripts import write_executable

pytestmark = pytest.mark.alternate

# Rank 1 ends in each round as the next of its arguments says: by a signal, with
# an exit code, or with the others, which wait for it.
ENDS = """
import os, pathlib, signal, sys, time
rank = os.environ.get("HOROVOD_RANK") or sys.argv.pop(1)
rounds = pathlib.Path("rounds")
if rank == "1":
    done = rounds.read_text() if rounds.exists() else ""
    rounds.write_text(done + "x")
    end = sys.argv[1 + len(done)]
    print("round", len(done), flush=True)
    if end.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, end))
    if end != "0":
        sys.exit(int(end))
    pathlib.Path("finished").touch()
while not os.path.exists("finished"):
    time.sleep(0.02)
print("finished", flush=True)
"""
AGAIN = "keras-towers run: starting all processes again, from the begin"


@pytest.mark.parametrize(
    ("ends", "code", "rounds"),
    [
        # Killed, and ended to be started again.
        (["SIGKILL", "75", "0"], 0, 3),
        (["SIGKILL", "SIGKILL", "SIGKILL"], 137, 3),
        # An error of the script would only be repeated.
        (["3"], 3, 1),
    ],
)
def test_lost_ranks_are_started_again(run, tmp_path, ends, code, rounds):
    options = "-np 2 --no-strategy --restarts 2 --output logs"
    done = run(options, ENDS, *ends)
    assert done.code == code, done.err
    shown = "".join(f"round {number}\n" for number in range(rounds))
    log = (tmp_path / "logs" / "rank.1.txt").read_text()
    assert log == shown + ("finished\n" if code == 0 else "")
    assert done.err.count(AGAIN) == rounds - 1
    assert ("(--restarts: 2 of 2)" in done.err) == (rounds == 3)
    assert done.out.count("[0] finished") == (code == 0)
    # Nor does it avoid the only host that it has.
    assert not re.search("no rank starts|--min-np|--blacklist", done.err)


def test_an_agent_that_a_signal_has_stopped_goes_on(run):
    """Nobody else learns how its rank ends."""
    script = """
import os, signal, sys
if os.environ["HOROVOD_RANK"] == "1":
    os.kill(os.getppid(), signal.SIGSTOP)
    sys.exit(int(sys.argv[1]))
"""
    for code in 0, 3:
        done = run("-np 2 --no-strategy", script, str(code))
        assert done.code == code
        assert "the agent of rank 1 was stopped (SIGSTOP)" in done.err


def test_a_lost_task_of_tensorflows_runtime(run):
    script = """
import json, os, sys
sys.argv.insert(1, str(json.loads(os.environ["TF_CONFIG"])["task"]["index"]))
"""
    done = run(
        "--workers 2 --no-strategy --restarts 1",
        script + ENDS,
        "SIGKILL",
        "0",
        HOROVOD_RANK="",
    )
    assert done.code == 0, done.err
    assert "rank 1 was killed by SIGKILL" in done.err
    assert done.out.count("finished") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_asked_to_end_is_not_started_again(
    launch, tmp_path, number
):
    job = launch(
        "-np 2 --no-strategy --restarts 3", "import time; time.sleep(600)"
    )
    # An agent for each of them.
    assert wait_until(lambda: len(job.family()) >= 4)
    os.kill(job.process.pid, number)
    done = job.finish()
    assert done.code == 128 + number
    assert AGAIN not in done.err


def test_a_host_that_does_not_answer_is_left_out(run, tmp_path):
    # It answers when the job asks whether it can be reached.
    write_executable(
        tmp_path / "ssh",
        'echo login >> logins; [ "$(wc -l < logins)" = 1 ] || exit 255',
    )
    script = """
import os, time
size = os.environ["HOROVOD_SIZE"]
print("of", size, flush=True)
time.sleep(0 if size == "1" else 600)
"""
    done = run(
        "-H localhost:1,192.0.2.1:1 --no-strategy --restarts 1",
        script,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.code == 0, done.err
    assert "rank 1: lost the ssh connection to 192.0.2.1" in done.err
    assert done.out.endswith("[0] of 1\n")


def test_other_hosts_cannot_join_a_job_on_loopback(launch, tmp_path):
    """It goes on without them, also where its own slots have become fewer.

    What looks for hosts ends with it.
    """
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2")
    looks = "cat hosts; test ! -e last || { echo $$ >looks; sleep 600; }"
    write_executable(tmp_path / "hosts.sh", looks)
    script = """
import os, signal, sys, time
from keras_towers.jobs.rendezvous import commits
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
size = os.environ["HOROVOD_SIZE"]
print("of", size, flush=True)
if size != "1":
    commits.report_resumes(True)
    signal.pause()
open("last", "w")
while not os.path.exists("looks"):
    time.sleep(0.1)
"""
    options = "--min-np 1 --max-np 2 --host-discovery-script ./hosts.sh"
    job = launch(f"{options} --no-strategy", script)
    job.wait_for("of 2", times=2)
    # A name that is not known yet changes nothing for the others.
    hosts.write_text("192.0.2.1:1\nlocalhost:1\nno.such.invalid:1")
    done = job.finish()
    assert done.code == 0, done.err
    assert done.out.count("of 1") == 1
    others = "no rank starts on 192.0.2.1, no.such.invalid: the job began on"
    assert done.err.count(others) == 1
    assert not psutil.pid_exists(int((tmp_path / "looks").read_text()))
    assert "has not ended" not in done.err


# It has made a backup, and makes another one when it is told to end.
BACKS_UP = """
import os, pathlib, signal, sys
from keras_towers.jobs.rendezvous import commits
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
folder = pathlib.Path(sys.argv[1]) if sys.argv[1:] else commits.folder()
commits.report_last(str(folder / "backup"), [0, 1])
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("folder", "code", "said"),
    [
        (["backup"], 75, "start the script again to resume (exit code 75)"),
        ([], 128 + signal.SIGTERM, "commits of kt.elastic end with their job"),
    ],
)
def test_what_can_be_resumed_after_a_signal(launch, folder, code, said):
    job = launch("-np 1 --restarts 1", BACKS_UP, *folder)
    job.wait_for("ready")
    os.kill(job.process.pid, signal.SIGTERM)
    done = job.finish()
    assert done.code == code
    assert said in done.last


def test_jobs_with_one_folder_for_commits_do_not_share_them(run, tmp_path):
    script = f"import os; print(os.environ['{settings.ENV_COMMITS}'])"
    options = "-np 1 --restarts 1 --commits kept"
    folders = {Path(run(options, script).out.strip()) for _ in range(2)}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "kept"}
    # Nobody else can go on from them.
    assert not [*(tmp_path / "kept").iterdir()]


# Rank 1 kills itself once a second process of each rank is there.
STANDS_BY = """
import os, pathlib, signal, time
import psutil
from keras_towers.jobs.rendezvous import store
own, killed = psutil.Process(), pathlib.Path("killed")
again = killed.exists()
rank = int(os.environ["HOROVOD_RANK"])
store.report_connected(rank)
launcher = own.parent().parent()
while not again:
    waiting = [len(agent.children()) for agent in launcher.children()]
    if rank == 1 and sum(waiting) == 4:
        killed.write_text(str(time.time()))
        os.kill(own.pid, signal.SIGKILL)
    time.sleep(0.05)
assert own.create_time() < float(killed.read_text())
print("of", os.environ["HOROVOD_SIZE"], flush=True)
"""


@pytest.mark.slow
def test_processes_that_stand_by_begin_where_one_is_lost(run):
    done = run("-np 2 --no-strategy --restarts 1 --standby", STANDS_BY)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[0] of 2", "[1] of 2"]
    assert done.err.count(AGAIN) == 1
