"""Variables of BytePS that somebody has set by hand."""

import socket

import pytest

from keras_towers.engines.byteps import dmlc
from keras_towers.foundation.errors import TowerError
from tests.kit.scripts import parse_variables, run_python

RIGHT = parse_variables(
    "DMLC_ROLE=worker DMLC_WORKER_ID=1 DMLC_NUM_WORKER=2 DMLC_NUM_SERVER=1"
    " DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=12345"
    " DMLC_NODE_HOST=127.0.0.1"
)


def test_a_worker():
    assert dmlc.check_worker(RIGHT) == (
        "worker 1 of 2, with 1 server(s) and the scheduler at 127.0.0.1:12345"
    )
    assert dmlc.check_worker({"PATH": "/bin"}) is None


@pytest.fixture
def ports():
    """A port in use, and a free one."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        yield {"taken": other.getsockname()[1], "free": free}


@pytest.mark.parametrize("role", ["worker", "scheduler", "server"])
def test_each_variable_is_required(role, ports):
    check = dmlc.check_worker if role == "worker" else dmlc.check_server
    port = str(ports["free"])
    right = {**RIGHT, "DMLC_ROLE": role, "DMLC_PS_ROOT_PORT": port}
    if role != "worker":
        del right["DMLC_WORKER_ID"]
    check(right)
    # BytePS finds an address itself.
    check({n: v for n, v in right.items() if n != "DMLC_NODE_HOST"})
    for name in right.keys() - {"DMLC_NODE_HOST"}:
        left = {n: value for n, value in right.items() if n != name}
        with pytest.raises(TowerError, match=name):
            check(left)


@pytest.mark.parametrize(
    ("role", "name", "value", "said"),
    [
        ("worker", "DMLC_ROLE", "server", "must be 'worker'"),
        ("worker", "DMLC_WORKER_ID", "2", "from 0 to 1"),
        ("worker", "DMLC_WORKER_ID", "one", "a whole number from 0"),
        ("worker", "DMLC_NUM_SERVER", "0", "from 1"),
        ("worker", "DMLC_PS_ROOT_PORT", "70000", "from 1 to 65535"),
        ("worker", "DMLC_PS_ROOT_URI", "no.host.invalid", "cannot be resolved"),
        ("worker", "DMLC_PS_ROOT_URI", "192.0.2.1", "give two loopback"),
        ("worker", "DMLC_NODE_HOST", "192.0.2.1", "an address of this machine"),
        ("worker", "DMLC_NODE_HOST", "::1", "cannot be resolved"),
        ("worker", "BYTEPS_LOCAL_RANK", "1", "from 0 to 0"),
        ("worker", "BYTEPS_ENABLE_ASYNC", "1", "unset it"),
        ("server", "DMLC_ROLE", "worker", "'scheduler' or 'server'"),
        ("server", "DMLC_NUM_WORKER", "x", "a whole number from 1"),
        ("scheduler", "DMLC_PS_ROOT_PORT", "taken", "a free port"),
    ],
)
def test_a_wrong_variable_is_named(role, name, value, said, ports):
    wrong = {**RIGHT, "DMLC_ROLE": role, name: str(ports.get(value, value))}
    check = dmlc.check_worker if role == "worker" else dmlc.check_server
    with pytest.raises(TowerError, match="BytePS cannot start") as error:
        check(wrong)
    assert name in str(error.value) and said in str(error.value)


SERVES = "-m", "keras_towers.engines.byteps.byteps_servers"
# Nothing is left of its sockets.
ALONE = (
    "-c",
    "from keras_towers.engines.byteps import dmlc; dmlc.set_defaults(None)",
)


@pytest.mark.parametrize(
    ("arguments", "role", "error"),
    [(SERVES, "boss", "DMLC_ROLE is 'boss'"), (ALONE, "worker", "")],
)
def test_a_process_of_its_own(arguments, role, error, tmp_path):
    done = run_python(
        *arguments, TMPDIR=str(tmp_path), DMLC_ROLE=role, limit_s=60
    )
    assert done.returncode == bool(error), done.stderr
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == bool(error)
    assert not list(tmp_path.iterdir())
