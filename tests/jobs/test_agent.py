"""What runs a rank on its host ends it when the launcher is gone."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil

from keras_towers.jobs import agent

LIMIT_S = 30
ORDER = {
    "read_from": [],
    "command": ["sleep", "300"],
    "folder": "/",
    "environment": {"HOROVOD_GLOO_IFACE": "lo"},
    "local_size": 1,
    "rendezvous": "127.0.0.1",
    "grace_s": 3,
    "lost_s": 1.0,
    "frozen_s": 1.2,
    "answers": False,
}


def start(stdout=None, **more):
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", agent.__file__],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps({**ORDER, **more}) + "\n")
    process.stdin.flush()
    return process


def test_a_launcher_elsewhere_that_gives_no_sign_of_life_is_gone():
    process, of_this_machine = start(), start(lost_s=None)
    for _ in range(20):
        process.stdin.write("0\n")
        process.stdin.flush()
        time.sleep(0.1)
    assert process.poll() is None
    # Its pipe stays open, as that of a host whose link is cut does.
    begun = time.monotonic()
    assert process.wait(LIMIT_S) == 128 + 15
    assert time.monotonic() - begun > 0.5
    process.communicate()
    assert of_this_machine.poll() is None
    of_this_machine.communicate(timeout=LIMIT_S)
    assert of_this_machine.returncode == 128 + 15


def test_a_signal_may_arrive_in_pieces():
    script = "trap 'exit 7' TERM; echo ready; sleep 60 & wait"
    process = start(command=["sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    for piece in ("1", "5\n"):
        process.stdin.write(piece)
        process.stdin.flush()
        time.sleep(0.3)
    assert process.wait(LIMIT_S) == 7
    process.communicate()


def test_a_command_that_is_stopped_for_long_is_lost_and_no_sooner():
    script = "sleep 300 & echo $$ $!; wait"
    process = start(
        command=["sh", "-c", script], lost_s=None, stdout=subprocess.PIPE
    )
    command, helper = map(int, process.stdout.readline().split())
    # What the command has started may stand still.
    os.kill(helper, signal.SIGSTOP)
    time.sleep(2.5)
    assert process.poll() is None
    # Looked at, it is nearly always stopped, but it runs at times.
    for _ in range(20):
        os.kill(command, signal.SIGSTOP)
        time.sleep(0.15)
        os.kill(command, signal.SIGCONT)
        time.sleep(0.003)
    assert process.poll() is None
    begun = time.monotonic()
    os.kill(command, signal.SIGSTOP)
    assert process.wait(LIMIT_S) == agent.FROZEN
    assert time.monotonic() - begun > 1
    assert not psutil.pid_exists(helper)
    process.communicate()


def test_it_answers_before_its_command_does():
    command = ["printf", "a\\0b"]
    # It ends its command when its stdin closes.
    with start(
        command=command, answers=True, lost_s=None, stdout=subprocess.PIPE
    ) as process:
        assert process.wait(LIMIT_S) == 0
        assert process.stdout.read() == "\0a\0b"


def test_what_the_user_has_set_is_left_as_it_is():
    environment = {"TF_NUM_INTRAOP_THREADS": "77"}
    agent.set_up_host(environment, "127.0.0.1", 1000)
    assert environment == {
        "TF_NUM_INTRAOP_THREADS": "77",
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_IFACE": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def test_a_folder_that_is_not_there_is_named():
    process = start(folder="/nowhere/at/all")
    _, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == agent.CANNOT_START
    assert error.startswith("host ")
    assert " has no folder /nowhere/at/all: " in error
    assert len(error.splitlines()) == 1
