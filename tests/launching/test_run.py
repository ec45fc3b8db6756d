"""``keras-towers run`` with real processes; no Horovod in the ranks here."""

import os
import re
import resource
import signal
import subprocess
import sys

import pytest

from tests.launching.jobs import Launched, all_gone

LIMIT_S = 60

HELLO = """
import os, sys
print("rank", os.environ["HOROVOD_RANK"], "of", os.environ["HOROVOD_SIZE"],
      sys.argv[1:], "Größe ✓")
print("to stderr", file=sys.stderr)
"""

# Rank 1 does what it is told, the others would go on for long.
ONE = """
import os, signal, sys, time
if os.environ["HOROVOD_RANK"] == "1":
    {}
time.sleep(600)
"""

# Every rank has a child, and that one of its own that left its session.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeper, start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("ready", "a") as file:
    print(os.getpid(), file=file)
time.sleep(0 if "leave" in sys.argv else 600)
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="script.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.fixture
def launch(tmp_path):
    """Start a job in a folder of its own."""
    running = []

    def launch(*arguments, **variables):
        running.append(Launched(tmp_path, arguments, **variables))
        return running[-1]

    yield launch
    for job in running:
        if job.process.poll() is None:
            job.finish(0)


@pytest.fixture
def run(launch):
    return lambda *arguments, **variables: launch(
        *arguments, **variables
    ).finish(LIMIT_S)


def test_lines_are_tagged_and_arguments_are_the_scripts(run, write):
    words = ["--epochs", "3", "-v", "-np", "9", "a b", "--help"]
    done = run("-np", "3", write(HELLO), *words)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        f"[{rank}] rank {rank} of 3 {words} Größe ✓" for rank in range(3)
    ]
    *errors, last = done.err.splitlines()
    assert sorted(errors) == [f"[{rank}] to stderr" for rank in range(3)]
    assert last.startswith(
        "keras-towers run: the 3 processes never connected: each ran the script"
    )


def test_one_rank_is_not_tagged(run, write):
    done = run("-np", "1", write(HELLO))
    assert done.out == "rank 0 of 1 [] Größe ✓\n"


@pytest.mark.parametrize(
    ("options", "read"), [(("-np", "1"), "words\n"), (("-np", "2"), "")]
)
def test_one_rank_reads_what_the_launcher_is_given(
    launch, write, options, read
):
    script = write("import sys; print(repr(sys.stdin.read()))")
    job = launch(*options, script, stdin=subprocess.PIPE)
    job.process.stdin.write(b"words\n")
    job.process.stdin.close()
    job.process.stdin = None
    done = job.finish(LIMIT_S)
    assert done.code == 0, done.err
    assert repr(read) in done.out


def test_module(run, write):
    write(HELLO, "hello.py")
    done = run("-np", "1", "-m", "hello", "--epochs", "1")
    assert "['--epochs', '1']" in done.out


def test_a_file_of_each_rank(run, write, tmp_path):
    done = run("-np", "2", "--output", "logs", write(HELLO))
    assert done.code == 0, done.err
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank.{rank}.txt").read_text()
        assert sorted(text.splitlines()) == [
            f"rank {rank} of 2 [] Größe ✓",
            "to stderr",
        ]


def test_lines_of_two_streams_are_whole_in_the_file(run, write, tmp_path):
    script = """
import sys, time
print("one ", end="", flush=True)
time.sleep(0.3)
print("other", file=sys.stderr, flush=True)
time.sleep(0.3)
print("line", flush=True)
print("no end", end="")
"""
    done = run("-np", "1", "--output", "logs", write(script))
    assert done.code == 0, done.err
    text = (tmp_path / "logs" / "rank.0.txt").read_text()
    assert text == "other\none line\nno end"


def test_output_is_not_held_back(launch, write, tmp_path):
    job = launch(
        "-np", "2", write("print('now')\nimport time\ntime.sleep(600)")
    )
    assert job.process.stdout.readline() in (b"[0] now\n", b"[1] now\n")


def test_cores_are_shared(run, write):
    text = "import os; print(os.environ.get('TF_NUM_INTRAOP_THREADS'))"
    assert re.fullmatch(
        r"(\[[01]\] \d+\n){2}", run("-np", "2", write(text)).out
    )
    kept = run("-np", "2", "script.py", TF_NUM_INTRAOP_THREADS="77")
    assert kept.out == "[0] 77\n[1] 77\n" or kept.out == "[1] 77\n[0] 77\n"
    assert run("-np", "1", "script.py").out == "None\n"


def test_exception_ends_the_others(run, write):
    done = run("-np", "3", write(ONE.format("raise ValueError('bad data')")))
    assert done.code == 1
    assert done.seconds < 30
    assert "[1] ValueError: bad data\n" in done.err
    assert done.last == (
        "keras-towers run: rank 1 ended with exit code 1; its last lines are "
        "above"
    )


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("sys.exit(7)", 7, "rank 1 ended with exit code 7"),
        ("os._exit(3)", 3, "rank 1 ended with exit code 3"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 1 was killed by SIGKILL (out of memory?)",
        ),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            "rank 1 was killed by SIGSEGV",
        ),
    ],
)
def test_exit_code_is_the_ranks(run, write, what, code, said):
    done = run("-np", "2", write(ONE.format(what)))
    assert done.code == code
    assert done.last == f"keras-towers run: {said}"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_stopped_launcher_leaves_nothing(launch, write, tmp_path, number, code):
    job = launch("-np", "2", write(FAMILY))
    job.wait_for(tmp_path / "ready", lines=2)
    family = job.family()
    # An agent, a rank, and four below it, twice.
    assert len(family) >= 10
    job.send(number)
    done = job.finish(20)
    assert done.code == code
    assert all_gone(family, 0.5)
    assert done.last == f"keras-towers run: stopped by {number.name}"


def test_ranks_that_ignore_sigterm_are_killed(launch, write, tmp_path):
    job = launch("-np", "2", write(FAMILY), "stubborn")
    job.wait_for(tmp_path / "ready", lines=2)
    family = job.family()
    job.send(signal.SIGINT)
    assert job.finish(20).code == 130
    assert all_gone(family, 0.5)


def test_killed_launcher_leaves_nothing(launch, write, tmp_path):
    job = launch("-np", "2", write(FAMILY))
    job.wait_for(tmp_path / "ready", lines=2)
    family = job.family()
    job.send(signal.SIGKILL)
    assert all_gone(family)


def test_finished_ranks_leave_nothing(launch, write, tmp_path):
    job = launch("-np", "2", write(FAMILY), "leave")
    job.wait_for(tmp_path / "ready", lines=2)
    family = job.family()
    assert job.finish(20).code == 0
    assert all_gone(family, 0.5)


TALKER = """
import os, pathlib, sys, time
with open("ready", "a") as file:
    file.write("ready\\n")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
for number in range(1000):
    print("x" * 1000)
time.sleep(100)
"""


def test_closed_output_ends_the_job(launch, write):
    job = launch("-np", "2", write("while True: print('x' * 1000)"))
    assert job.process.stdout.readline()
    job.process.stdout.close()
    assert job.process.wait(20) == 141


def test_output_that_cannot_be_written_ends_the_job(launch, write, tmp_path):
    job = launch("-np", "2", "--output", "logs", write(TALKER), "go")
    job.wait_for(tmp_path / "ready", lines=2)
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    family = job.family()
    (tmp_path / "go").touch()
    done = job.finish(20)
    assert done.code == 1
    assert re.search(r"cannot be written to .*logs/rank.\d.txt", done.last)
    assert "File too large" in done.last
    assert all_gone(family, 0.5)


def test_standard_output_on_a_full_disk(write, tmp_path):
    script = write("while True: print('x' * 1000)")
    command = [sys.executable, "-m", "keras_towers.cli.main", "run"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, "-np", "2", script],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "cannot be written to <stdout>: No space left" in done.stderr


UNDER_SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
}


def test_under_another_launcher_it_becomes_its_rank(run, write):
    script = write(
        "import os, sys\n"
        "kept = 'KERAS_TOWERS_SEED', 'HOROVOD_RANK', 'SLURM_PROCID'\n"
        "print(os.getppid(), sys.argv[1:], *map(os.environ.get, kept))\n"
    )
    done = run(script, "x", **UNDER_SRUN)
    assert done.code == 0, done.err
    # It is a child of the tests: no launcher is in between.
    assert done.out == f"{os.getpid()} ['x'] None None 1\n"
    done = run("-np", "1", script, **UNDER_SRUN)
    assert done.out.endswith("[] None 0 1\n")
    refused = run("--output", "logs", script, **UNDER_SRUN)
    assert "--output is not for rank 1 of 2 that srun started" in refused.last


def test_an_allocation_says_how_many_run_where(run, write):
    script = write("import os; print(os.environ['HOROVOD_SIZE'])")
    allocated = {
        "SLURM_JOB_NODELIST": "n7",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURMD_NODENAME": "n7",
    }
    done = run(script, **allocated)
    assert sorted(done.out.splitlines()) == ["[0] 2", "[1] 2"], done.err
    assert "2 processes on localhost, as Slurm says" in done.err
    # More than tasks were asked for.
    assert len(run("-np", "3", script, **allocated).out.splitlines()) == 3


def test_another_host(run, write, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift 2; done\n'
        'echo "$1" >> hosts_asked; shift; exec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    script = write(
        "import os, sys\n"
        "print(os.environ['HOROVOD_HOSTNAME'], sys.argv[1:],"
        " os.environ['HOROVOD_GLOO_IFACE'],"
        " os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR'])\n"
        "sys.exit(5 * int(os.environ['HOROVOD_RANK']))\n"
    )
    done = run(
        *("-np", "2", "-H", "localhost:1,192.0.2.1:1", script, "a 'b"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.code == 5, done.err
    assert "[0] localhost" in done.out
    assert '[1] 192.0.2.1 ["a \'b"]' in done.out
    assert "127.0.0.1" not in done.out
    # Once to see whether it answers.
    assert (tmp_path / "hosts_asked").read_text() == "192.0.2.1\n" * 2
