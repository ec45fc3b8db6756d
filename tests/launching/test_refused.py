"""What ``keras-towers run`` refuses, in one line."""

import sys

import pytest
from typer.testing import CliRunner

from keras_towers.cli.main import app
from keras_towers.strategies.registry import STRATEGIES, Registered


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\n")
    babbles = tmp_path / "babbles.sh"
    babbles.write_text("#!/bin/sh\necho Loading modules\n")
    babbles.chmod(0o755)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("s.py", "give the number of processes: -np N"),
        ("-np 0 s.py", "-np must be at least 1, not 0"),
        ("-np 2 none.py", "script not found: none.py"),
        ("-np 2 python s.py", "give the script itself, without 'python'"),
        ("-np 2 -H a:b s.py", "-H takes host:slots,"),
        ("-np 2 -H a:2 --hostfile b s.py", "give -H or --hostfile, not both"),
        ("-np 2 --hostfile none s.py", "cannot read the hostfile none"),
        (
            "-np 3 -H localhost:2 s.py",
            "3 processes do not fit into the hosts' 2 slots",
        ),
        ("-np 1 -H no.such.invalid:1 s.py", "unknown host no.such.invalid"),
        ("-np 2 --strategy nope s.py", "unknown strategy 'nope'; known are"),
        ("-np 2 --strategy tower s.py", "works in one process"),
        ("-np 2 --strategy noop s.py", "works in one process"),
        ("-np 2 --strategy horovod --servers 1 s.py", "no use for BytePS's"),
        ("-np 2 --servers 1 --min-np 1 s.py", "a fixed number of processes"),
        ("-np 2 --towers 2 s.py", "--towers needs --strategy"),
        ("-np 2 --network-interface no0 s.py", "no network interface no0"),
        ("--ps 1 s.py", "processes that train: --workers N"),
        ("--ps 0 --workers 2 s.py", "--ps must be at least 1, not 0"),
        ("--workers 0 s.py", "--workers must be at least 1, not 0"),
        ("-np 2 --workers 2 s.py", "--workers for the processes that train"),
        ("--ps 1 -np 2 s.py", "--workers for the processes that train"),
        ("--ps 1 --workers 2 -H a:3 s.py", "-H is not for jobs on TensorF"),
        ("--ps 1 --workers 2 --min-np 1 s.py", "--min-np is not for jobs on"),
        (
            "--workers 2 --strategy horovod s.py",
            "connected otherwise: give -np",
        ),
        ("--min-np 0 s.py", "--min-np must be at least 1, not 0"),
        ("--min-np 3 --max-np 2 s.py", "smallest first"),
        ("--max-np 2 s.py", "an elastic job needs --min-np or -np"),
        (
            "--min-np 1 --host-discovery-script hosts.sh s.py",
            "hosts.sh is not executable: chmod +x hosts.sh",
        ),
        (
            "--min-np 1 --host-discovery-script babbles.sh s.py",
            "babbles.sh has to print lines like 'host:2' or 'host', not",
        ),
        ("-np 1 --output s.py s.py", "cannot write to the folder s.py (File"),
        ("-np 1 --output s.py/a s.py", "s.py/a (Not a directory): give"),
        ("--min-np 1 --output /proc/a s.py", "/proc/a (No such file"),
    ],
)
def test_one_line_says_why(arguments, said):
    result = CliRunner().invoke(app, ["run", *arguments.split()])
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_missing_horovod(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "horovod":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    result = CliRunner().invoke(app, ["run", "-np", "2", "s.py"])
    assert result.exit_code == 2
    assert "run `keras-towers install horovod`" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_help_names_every_option():
    result = CliRunner().invoke(app, ["run", "--help"])
    assert result.exit_code == 0
    for option in ("-np", "--hosts", "--strategy", "--min-np", "--output"):
        assert option in result.output


@pytest.fixture
def two_more(monkeypatch):
    """Two strategies on TensorFlow's runtime."""
    for name, roles in (("served", ("ps", "worker")), ("peers", ("worker",))):
        entry = Registered("a:B", one_process=False, roles=roles)
        monkeypatch.setitem(STRATEGIES, name, entry)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "-np 3 --strategy served",
            "needs parameter servers: --ps 1 --workers",
        ),
        ("--workers 3 --strategy served", "servers: --ps 1 --workers 3"),
        ("--ps 1 --workers 3 --strategy peers", "no use for parameter servers"),
        ("--strategy peers", "give the number of processes that train"),
        (
            "-np 2 --ssh-port 22 --strategy peers",
            "--ssh-port is not for jobs on",
        ),
    ],
)
def test_one_line_says_what_a_strategy_needs(arguments, said, two_more):
    result = CliRunner().invoke(app, ["run", *arguments.split(), "s.py"])
    assert result.exit_code == 2, result.output
    assert said in result.output
