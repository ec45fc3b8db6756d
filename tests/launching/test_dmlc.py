"""Variables of BytePS that somebody has set by hand."""

import pytest

from keras_towers.errors import TowerError
from keras_towers.launching import dmlc

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
