"""What ``keras-towers run`` refuses, in one line."""

import sys

import pytest
from typer.testing import CliRunner

from keras_towers.cli.main import app
from tests.kit.scripts import parse_variables, write_executable

SERVED, PEERS = "--strategy sync-replicas", "--strategy multi-worker"
FINDS = "--min-np 1 --host-discovery-script"
OF_SRUN = "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_PROCID=1"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\n")
    write_executable(tmp_path / "babbles.sh", "echo Loading modules")


def refused(options):
    result = CliRunner().invoke(app, ["run", *options.split(), "s.py"])
    assert result.exit_code == 2, result.output
    return result.output.strip().splitlines()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "give the number of processes: -np N"),
        ("-np 2 none.py", "script not found: none.py"),
        ("-np 2 -H a:2 --hostfile b", "give -H or --hostfile, not both"),
        ("-np 3 -H localhost:2", "3 processes do not fit into the hosts' 2 sl"),
        ("-np 2 --strategy nope", "unknown strategy 'nope'; known are"),
        ("-np 2 --strategy tower", "works in one process"),
        (
            "-np 2 --strategy horovod:towers=2",
            "takes no option towers: give --towers",
        ),
        ("-np 2 --strategy horovod:a=1:a=2", "gives a twice: leave one out"),
        ("-np 2 --strategy horovod --no-strategy", "or --strategy, not both"),
        ("-np 2 --strategy horovod:comression=1", "Did you mean 'compression'"),
        ("-np 2 --strategy horovod:packer", "write packer=VALUE"),
        ("--ps 1 --workers 2 --no-strategy", "--no-strategy or --ps, not both"),
        ("-np 2 --strategy horovod --servers 1", "does not use servers"),
        ("-np 2 --towers 2", "--towers needs --strategy"),
        ("-np 2 --seed 1", "--seed needs --strategy"),
        ("-np 1 --output s.py", "cannot write to the folder s.py (File"),
        # Jobs on TensorFlow's runtime.
        ("--ps 1 -np 2", "--workers for the processes that train"),
        ("--ps 1 --workers 2 -H a:3", "run: -H cannot be given with paramet"),
        ("--ps 1 --workers 2 --min-np 2", "run: --min-np cannot be given with"),
        (
            "--workers 2 --strategy horovod",
            "do not work with the strategy horovod: give -np",
        ),
        (f"-np 3 {SERVED}", "parameter servers: --ps 1 --workers 3"),
        (f"--ps 1 --workers 3 {PEERS}", "does not use parameter servers"),
        (PEERS, "give the number of processes that train"),
        ("-np 2 --standby", "start again: give --restarts or --min-np"),
        # Elastic jobs.
        (
            "--min-np 2 --restarts 3",
            "To limit that, give --reset-limit 3",
        ),
        ("--min-np 3 --max-np 2", "run: --min-np 3 and --max-np 2 must be"),
        (
            "--min-np 3 -np 2 --max-np 4",
            "--min-np 3, -np 2 and --max-np 4 must be in ascending order",
        ),
        ("-np 2 --reset-limit 0", "run: --reset-limit cannot be given with"),
        (
            "-np 2 --restarts 1 --reset-limit 1 --elastic-timeout 600",
            "run: --elastic-timeout and --reset-limit cannot be given without",
        ),
        ("--max-np 2", "an elastic job needs --min-np or -np"),
        ("--min-np 1 --blacklist-cooldown-range 9 5", "range takes two num"),
        ("--min-np 4 -H localhost:2", "4 processes are more than the 2 slots"),
        ("-np 2 --commits x", "start again: give --restarts or --min-np"),
        (f"-H a {FINDS} hosts.sh", "-script or hosts, not both"),
        (f"{FINDS} none.sh", "none.sh cannot be run (No such file"),
        (f"{FINDS} hosts.sh", "hosts.sh cannot be run (Permission denied)"),
        (f"{FINDS} babbles.sh", "'host:2' or 'host', not 'Loading modules'"),
    ],
)
def test_one_line_says_why(options, said):
    (line,) = refused(options)
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("s.py -np 2 --np", ": -np, before s.py, which gets -np"),
        ("s.py --workers 2", ": --workers, before s.py, which gets --workers"),
        ("s.py --towers 2", ": -np N, before s.py, which gets --towers"),
        (
            "--strategy multi-worker s.py --workers=2 --seed 1 --ps 1",
            "train: --workers, before s.py, which gets --workers, --ps",
        ),
    ],
)
def test_options_behind_the_script_are_named(arguments, said):
    result = CliRunner().invoke(app, ["run", *arguments.split()])
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert line.endswith(f"{said} behind it")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--output logs",
            "--output does not work for rank 1 of 2 that srun started",
        ),
        (
            "--restarts 2",
            "--restarts does not work for rank 1 of 2 that srun started",
        ),
        ("--workers 2", "would start a cluster: start it once, without"),
        ("--min-np 2", "would start an elastic job: start it once, without"),
    ],
)
def test_under_another_launcher(options, said, monkeypatch):
    for name, value in parse_variables(OF_SRUN).items():
        monkeypatch.setenv(name, value)
    (line,) = refused(options)
    assert said in line


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("KERAS_TOWERS_SEED=abc", "KERAS_TOWERS_SEED is 'abc': give a whole"),
        ("KERAS_TOWERS_RANK=x", "KERAS_TOWERS_RANK is 'x': give a whole"),
        ("KERAS_TOWERS_SIZE=-1", "KERAS_TOWERS_SIZE is '-1': give a whole"),
        ("KERAS_TOWERS_SIZE=2", "KERAS_TOWERS_SIZE is 2, but nothing says"),
        ("TF_CONFIG={bad", "TF_CONFIG"),
        (
            "KERAS_TOWERS_NCCL_TIMEOUT=1m",
            "KERAS_TOWERS_NCCL_TIMEOUT is '1m': g",
        ),
    ],
)
def test_variables_are_checked_before_ranks_start(variable, said, monkeypatch):
    for name, value in parse_variables(variable).items():
        monkeypatch.setenv(name, value)
    (line,) = refused("-np 2 --no-strategy")
    assert line.startswith(f"keras-towers run: {said}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-np two", "'-np' / '-n' / '--num-proc': 'two'"),
        ("-np 2 --grace=1h", "'--grace': '1h'"),
    ],
)
def test_a_value_that_is_no_number_is_named(options, said):
    assert said in refused(options)[-1]


def test_missing_horovod(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "horovod":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    (line,) = refused("-np 2")
    assert "run `keras-towers install horovod`" in line
