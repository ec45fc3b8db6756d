"""Which devices are the towers, and what is said of those that cannot be."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import devices as devices_lib
from tests.conftest import TOWERS

pytestmark = pytest.mark.core

FULL = "/job:localhost/replica:0/task:0"


def short(names):
    return [name[name.index("/device") :] for name in names]


def test_all_by_default(devices):
    assert short(devices_lib.resolve(None)) == devices


def test_a_number(devices):
    assert short(devices_lib.resolve(3)) == devices[:3]
    assert short(devices_lib.resolve(TOWERS)) == devices


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array])
def test_whole_numbers_of_other_types(devices, kind):
    assert short(devices_lib.resolve(kind(2))) == devices[:2]
    assert kt.virtual_towers(kind(TOWERS)) == devices


@pytest.mark.parametrize(
    "name", ["/device:CPU:2", "CPU:2", "cpu:2", "/cpu:2", "/CPU:2"]
)
def test_every_way_to_write_a_name(name):
    assert short(devices_lib.resolve([name])) == ["/device:CPU:2"]


def test_a_name_with_a_task():
    name = f"{FULL}/device:CPU:3"
    assert short(devices_lib.resolve([name])) == ["/device:CPU:3"]


def test_the_order_is_the_users():
    names = devices_lib.resolve(("CPU:5", "CPU:1"))
    assert short(names) == ["/device:CPU:5", "/device:CPU:1"]


@pytest.mark.parametrize(
    "towers,expected",
    [
        (0, ["towers=0", "1 to 8", "None"]),
        (-2, ["towers=-2", "1 to 8", "None"]),
        (9, ["towers=9", "Give at most 8", "virtual_towers(9)"]),
        ([], ["towers=[]", "at least one", "None"]),
        (True, ["towers=True", "number of towers"]),
        (np.True_, ["True", "number of towers"]),
        (2.0, ["towers=2.0", "number of towers"]),
        (np.float64(2), ["2.0", "number of towers"]),
        (np.int64(9), ["towers=9,", "Give at most 8", "virtual_towers(9)"]),
        ("CPU:0", ["towers='CPU:0'", "list of device names"]),
        (["CPU:1", "CPU:1"], ["/device:CPU:1", "more than once"]),
        (["CPU:1", "/device:cpu:1"], ["/device:CPU:1", "more than once"]),
        (["CPU:8"], ["'CPU:8'", "Visible:", "/device:CPU:7"]),
        (["GPU:0"], ["'GPU:0'", "Visible:"]),
        ([0], ["there is no device 0", "GPU ids", "no GPU is visible"]),
        ([np.int64(0)], ["there is no device", "no GPU is visible"]),
        ([-1], ["there is no device -1"]),
        ([True], ["there is no device True"]),
        ([None], ["there is no device None"]),
        (["nonsense"], ["'nonsense'", "Visible:"]),
        ([""], ["there is no device ''"]),
        (["/job:worker/task:1/device:CPU:0"], ["/job:worker", "Visible:"]),
    ],
)
def test_bad_towers(towers, expected):
    with pytest.raises(kt.TowerError) as error:
        kt.TowerStrategy(towers)
    for part in expected:
        assert part in str(error.value)
    assert not tf.distribute.has_strategy()


@pytest.fixture
def two_gpus(monkeypatch):
    """TensorFlow lists two GPUs; nothing may be put on them."""
    logical = {"GPU": 2, "CPU": TOWERS}

    def listed(kind):
        return [
            tf.config.LogicalDevice(f"/device:{kind}:{index}", kind)
            for index in range(logical[kind])
        ]

    monkeypatch.setattr(tf.config, "list_logical_devices", listed)
    monkeypatch.setattr(devices_lib, "_made", [])


@pytest.mark.usefixtures("two_gpus")
def test_gpus_come_before_cpus():
    gpus = ["/device:GPU:0", "/device:GPU:1"]
    assert devices_lib.resolve(None) == gpus
    assert devices_lib.resolve(2) == gpus
    assert devices_lib.resolve([1, 0]) == gpus[::-1]
    assert devices_lib.resolve([np.int64(1)]) == gpus[1:]
    assert devices_lib.resolve(["cpu:0", 1]) == ["/device:CPU:0", gpus[1]]
    with pytest.raises(kt.TowerError, match="Give at most 2"):
        devices_lib.resolve(3)
    with pytest.raises(kt.TowerError, match="no device 2"):
        devices_lib.resolve([2])
    with pytest.raises(kt.TowerError, match="more than once"):
        devices_lib.resolve([1, "GPU:1"])


@pytest.mark.usefixtures("two_gpus")
def test_what_virtual_towers_made_comes_before_gpus():
    made = kt.virtual_towers(3)
    assert devices_lib.resolve(None) == made
    assert devices_lib.resolve(2) == made[:2]
    assert len(devices_lib.resolve(TOWERS)) == TOWERS
    with pytest.raises(kt.TowerError, match=f"Give at most {TOWERS}"):
        devices_lib.resolve(TOWERS + 1)
    # By name or id a GPU can still be had.
    assert devices_lib.resolve([1]) == ["/device:GPU:1"]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("gpus", [0, 1])
def test_towers_beside_a_gpu_are_not_alone(gpus, monkeypatch, caplog):
    listed = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind: listed(kind)[: gpus if kind == "GPU" else 2],
    )
    with kt.TowerStrategy(["CPU:0", "CPU:1"]):
        pass
    assert "no other device" not in caplog.text


def test_the_last_call_of_virtual_towers_counts():
    kt.virtual_towers(4)
    kt.virtual_towers(2)
    assert kt.TowerStrategy().num_towers == 2
    kt.virtual_towers(5)
    assert kt.TowerStrategy().num_towers == 5


@pytest.mark.parametrize("towers", [0, -1, True, np.True_, 2.0, "2", None])
def test_bad_number_of_virtual_towers(towers):
    with pytest.raises(kt.TowerError, match="whole number, 1 or more"):
        kt.virtual_towers(towers)


def test_virtual_towers_twice_with_fewer_is_fine(devices):
    assert kt.virtual_towers(3) == devices[:3]


def test_virtual_towers_too_late():
    with pytest.raises(kt.TowerError) as error:
        kt.virtual_towers(TOWERS + 1)
    for part in (f"virtual_towers({TOWERS + 1})", "too late", f"{TOWERS} CPU"):
        assert part in str(error.value)


def test_virtual_towers_in_a_fresh_process():
    script = (
        "import keras_towers as kt\n"
        "print(kt.virtual_towers(3))\n"
        "print(kt.TowerStrategy().describe())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']" in ended.stdout
    assert "3 towers (/device:CPU:0 to /device:CPU:2)" in ended.stdout
