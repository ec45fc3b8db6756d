"""``keras-towers run`` with real processes; no Horovod in the ranks here."""

import os
import signal
import subprocess

import pytest

from tests.kit.processes import RUN, all_gone
from tests.kit.scripts import parse_variables, write_executable

pytestmark = pytest.mark.alternate

SHOWS = """
import os, sys
names = "HOROVOD_RANK", "HOROVOD_SIZE", "TF_NUM_INTRAOP_THREADS"
print(*map(os.environ.get, names), sys.argv[1:], repr(sys.stdin.read()),
      "Größe ✓")
print("to stderr", file=sys.stderr)
"""

# While a line of one stream is half written, the other stream gets a whole one.
# The null character is no answer of an agent.
HALVES = """
import os, pathlib, sys, time
print("a\\0", end="", flush=True)
print("to stderr", file=sys.stderr)
own = pathlib.Path(f"logs/rank.{os.environ['HOROVOD_RANK']}.txt")
while "stderr" not in own.read_text():
    time.sleep(0.01)
print("line", flush=True)
print("no end", end="")
"""

# Every rank has two children: one that left its session, and one with a child.
FAMILY = """
import os, signal, subprocess, sys, time
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeper, start_new_session=True)
two = subprocess.Popen(
    ["sh", "-c", "sleep 600 & echo; sleep 600"], stdout=subprocess.PIPE
)
two.stdout.readline()
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("ready", "a") as file:
    print(os.getpid(), file=file)
while not ("leave" in sys.argv and os.path.exists("may leave")):
    time.sleep(0.05)
"""


def test_each_rank_has_all_arguments_its_number_and_no_stdin(run):
    words = ["--epochs", "3", "-v", "-np", "9", "a b", "--help", "--ps=2"]
    done = run("-np 3", SHOWS, *words, stdin="not for all of them\n")
    assert done.code == 0, done.err
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert sorted(done.out.splitlines()) == [
        f"[{rank}] {rank} 3 {threads} {words} '' Größe ✓" for rank in range(3)
    ]
    first, *errors, last = done.err.splitlines()
    assert first.endswith("before script.py, which gets --ps behind it")
    assert sorted(errors) == [f"[{rank}] to stderr" for rank in range(3)]
    assert last == (
        "keras-towers run: the 3 processes never connected: each ran the "
        "script on its own. To train one model in all of them, add --strategy "
        "horovod, or use kt.HorovodStrategy() in the script"
    )


def test_lines_are_shown_and_logged_whole(run, tmp_path):
    done = run("-np 2 --output logs", HALVES)
    assert done.code == 0, done.err
    lines = ["a\0line", "no end"]
    assert sorted(done.out.splitlines()) == [
        f"[{rank}] {line}" for rank in range(2) for line in lines
    ]
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank.{rank}.txt").read_text()
        assert sorted(text.splitlines()) == [*lines, "to stderr"]


def test_one_rank_is_as_a_process_without_the_launcher(run):
    done = run("-np 1 -m", SHOWS, "--epochs", "1", stdin="words\n")
    assert done.code == 0, done.err
    assert done.out == r"0 1 None ['--epochs', '1'] 'words\n' Größe ✓" + "\n"
    assert done.err == "to stderr\n"


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [
        # They are killed some seconds later.
        (signal.SIGINT, ["stubborn"], 130),
        (signal.SIGTERM, [], 143),
        (None, ["leave"], 0),
        (signal.SIGKILL, [], -signal.SIGKILL),
    ],
)
def test_no_end_of_the_launcher_leaves_anything(
    launch, tmp_path, number, words, code
):
    job = launch("-np 2", FAMILY, *words)
    job.wait_for("\n", tmp_path / "ready", times=2)
    family = job.family()
    # An agent, a rank, and four below it, twice.
    assert len(family) >= 10
    if number is not None:
        job.process.send_signal(number)
    (tmp_path / "may leave").touch()
    done = job.finish()
    assert done.code == code
    assert all_gone(family)
    if code > 0:
        assert done.last == f"keras-towers run: stopped by {number.name}"


def test_a_closed_pipe_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("while True:\n    print('x' * 1000)")
    command = *RUN, "-np", "2", str(script)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
        assert job.stdout.readline().startswith(b"[")
        job.stdout.close()
        assert job.wait(60) == 141


def test_output_that_cannot_be_written_ends_the_job(run, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank.1.txt").symlink_to("/dev/full")
    done = run("-np 2 --output logs", "import time; print(1); time.sleep(600)")
    assert done.code == 1
    assert done.last.endswith(
        "cannot be written to logs/rank.1.txt: No space left on device"
    )


def test_under_another_launcher_it_becomes_its_rank(run):
    step = parse_variables(
        "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1"
        " SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1"
    )
    script = """
import os, sys
kept = "KERAS_TOWERS_SEED", "HOROVOD_RANK", "SLURM_PROCID"
print(os.getppid(), sys.argv[1:], *map(os.environ.get, kept))
"""
    done = run("", script, "x", **step)
    assert done.code == 0, done.err
    # It is a child of the tests: no launcher is in between.
    assert done.out == f"{os.getpid()} ['x'] None None 1\n"
    done = run("-np 1", script, **step)
    assert done.out.endswith("[] None 0 1\n")


@pytest.mark.parametrize(
    "servers, suggested",
    [(0, "MultiWorkerTower"), (1, "SyncReplicas")],
)
def test_under_tf_config_it_becomes_its_task(
    launch, run, tasks, servers, suggested
):
    clusters = tasks.cluster(ps=servers, worker=2)
    *serving, _, here = [{"TF_CONFIG": each.to_json()} for each in clusters]
    script = """
import os
from keras_towers.jobs.rendezvous import separate_training
print(os.getppid(), separate_training._reason)
"""
    # A worker waits for the servers before it runs the script.
    for task in serving:
        launch("", script, **task)
    done = run("", script, **here)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{os.getpid()} ")
    assert f"kt.{suggested}Strategy()" in done.out
    done = run("--servers 1", script, **here)
    assert "whose processes this command starts" in done.err


def test_an_allocation_says_how_many_run_where(run):
    allocated = parse_variables(
        "SLURM_JOB_NODELIST=n7 SLURM_TASKS_PER_NODE=2 SLURMD_NODENAME=n7"
    )
    script = "import os; print(os.environ['HOROVOD_SIZE'])"
    done = run("", script, **allocated)
    assert sorted(done.out.splitlines()) == ["[0] 2", "[1] 2"], done.err
    assert "2 processes on localhost, as Slurm says" in done.err
    # More than there are tasks.
    assert len(run("-np 3", script, **allocated).out.splitlines()) == 3
    # A strategy over TensorFlow has them too; there is no ssh to the other.
    several = {
        **allocated,
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }
    done = run("--strategy multi-worker", script, **several)
    assert done.code == 2
    assert "4 processes on localhost, n8, as Slurm says" in done.err


def test_another_host(run, tmp_path):
    write_executable(
        tmp_path / "ssh",
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        'echo "$1" >> hosts; shift; exec sh -c "$*"',
    )
    script = """
import os, sys
names = "HOSTNAME", "GLOO_IFACE", "GLOO_RENDEZVOUS_ADDR"
print(sys.argv[1:], *(os.environ["HOROVOD_" + name] for name in names))
sys.exit(5 * int(os.environ["HOROVOD_RANK"]))
"""
    done = run(
        "-H localhost:1,192.0.2.1:1",
        script,
        "a 'b",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.code == 5, done.err
    assert '[0] ["a \'b"] localhost' in done.out
    assert '[1] ["a \'b"] 192.0.2.1' in done.out
    assert "127.0.0.1" not in done.out
    # Once to see whether it answers.
    assert (tmp_path / "hosts").read_text() == "192.0.2.1\n" * 2
