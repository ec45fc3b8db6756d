"""Variables of BytePS that somebody has set by hand."""

import os
import socket
import subprocess
import sys

import pytest

from keras_towers.errors import TowerError
from keras_towers.launching import dmlc
from tests.launching.jobs import ROOT

RIGHT = {
    "DMLC_ROLE": "worker",
    "DMLC_WORKER_ID": "1",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "12345",
    "DMLC_NODE_HOST": "127.0.0.1",
    "KERAS_TOWERS_SECRET": "of this test",
}


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_worker():
    found = dmlc.worker(RIGHT)
    assert found == dmlc.Worker(1, 2, 1, "127.0.0.1", 12345)
    assert str(found) == (
        "worker 1 of 2, with 1 server(s) and the scheduler at 127.0.0.1:12345"
    )


def test_no_job():
    assert dmlc.worker({"PATH": "/bin"}) is None


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_each_has_to_be_there(name):
    left = {n: value for n, value in RIGHT.items() if n != name}
    if name == "DMLC_NODE_HOST":  # BytePS finds an address itself.
        assert dmlc.worker(left)
        return
    with pytest.raises(TowerError, match=name):
        dmlc.worker(left)


@pytest.mark.parametrize(
    "name,value,said",
    [
        ("DMLC_ROLE", "server", "has to be 'worker'"),
        ("DMLC_WORKER_ID", "2", "less than DMLC_NUM_WORKER=2"),
        ("DMLC_WORKER_ID", "one", "a whole number, at least 0"),
        ("DMLC_NUM_SERVER", "0", "at least 1"),
        ("DMLC_PS_ROOT_PORT", "70000", "less than 65536"),
        ("DMLC_PS_ROOT_URI", "no.such.host.invalid", "no host"),
        ("DMLC_PS_ROOT_URI", "192.0.2.1", "either both are"),
        ("DMLC_NODE_HOST", "192.0.2.1", "an address of this machine"),
        ("BYTEPS_LOCAL_RANK", "1", "less than BYTEPS_LOCAL_SIZE=1"),
        ("BYTEPS_ENABLE_ASYNC", "1", "unset it"),
    ],
)
def test_what_is_wrong_is_said(name, value, said):
    with pytest.raises(TowerError, match="BytePS cannot start") as error:
        dmlc.worker({**RIGHT, name: value})
    assert name in str(error.value) and said in str(error.value)


def serving(role, **changed):
    shared = {n: v for n, v in RIGHT.items() if "WORKER_ID" not in n}
    return {**shared, "DMLC_ROLE": role, **changed}


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_process_that_serves(role, free_port):
    right = serving(role, DMLC_PS_ROOT_PORT=str(free_port))
    dmlc.check_server(right)
    for name in ("DMLC_NUM_WORKER", "DMLC_PS_ROOT_PORT", "DMLC_PS_ROOT_URI"):
        left = {n: value for n, value in right.items() if n != name}
        with pytest.raises(TowerError, match=name):
            dmlc.check_server(left)


@pytest.mark.parametrize(
    "role,name,value,said",
    [
        ("worker", "DMLC_ROLE", "worker", "'scheduler' or 'server'"),
        ("server", "DMLC_NUM_WORKER", "x", "a whole number, at least 1"),
        ("server", "DMLC_PS_ROOT_PORT", "99999", "less than 65536"),
        ("server", "DMLC_NODE_HOST", "192.0.2.1", "an address of this machine"),
        ("scheduler", "DMLC_PS_ROOT_PORT", "{taken}", "a free port"),
    ],
)
def test_what_is_wrong_where_it_serves(role, name, value, said):
    with socket.create_server(("127.0.0.1", 0)) as other:
        told = value.format(taken=other.getsockname()[1])
        with pytest.raises(TowerError, match="BytePS cannot start") as error:
            dmlc.check_server(serving(role, **{name: told}))
    assert name in str(error.value) and said in str(error.value)


def test_one_line_where_it_serves():
    done = subprocess.run(
        [sys.executable, "-m", "keras_towers.launching.byteps_server"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DMLC_ROLE": "boss"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "DMLC_ROLE is 'boss'" in done.stderr


def test_nothing_is_left_of_sockets(tmp_path):
    lines = "import keras_towers.launching.dmlc as dmlc; dmlc.prepare(None)"
    unset = {n: v for n, v in os.environ.items() if "BYTEPS" not in n}
    subprocess.run(
        [sys.executable, "-c", lines],
        env={**unset, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        check=True,
        timeout=60,
    )
    assert not list(tmp_path.iterdir())
