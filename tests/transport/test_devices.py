"""Which devices are the towers, and what is said of those that cannot be."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.foundation import compat
from keras_towers.foundation.settings import ENV_DEVICE_MEMORY, ENV_OWN_GPUS
from keras_towers.transport import devices as devices_lib
from tests.conftest import TOWERS

pytestmark = pytest.mark.core


def resolved(towers):
    """The numbers of the CPUs that are meant."""
    names = devices_lib.devices_of(towers)
    return [int(name.rpartition("/device:CPU:")[2]) for name in names]


@pytest.mark.parametrize(
    ("towers", "cpus"),
    [
        (None, range(TOWERS)),
        (3, range(3)),
        (np.int64(2), range(2)),
        (["/cpu:2"], [2]),
        (["/job:localhost/replica:0/task:0/device:CPU:3"], [3]),
        # The order is the user's.
        (("CPU:5", "CPU:1"), [5, 1]),
    ],
    ids=str,
)
def test_every_way_to_name_towers(towers, cpus):
    assert resolved(towers) == list(cpus)


@pytest.mark.parametrize(
    ("towers", "expected"),
    [
        (-2, ["towers=-2", "1 to 8", "None"]),
        (np.int64(9), ["towers=9 ", "Give 1 to 8", "virtual_towers"]),
        ([], ["towers=[]", "None for all devices"]),
        (True, ["towers=True", "number of towers"]),
        ("CPU:0", ["towers='CPU:0'", "a list of GPU ids or device names"]),
        (["CPU:1", "/device:cpu:1"], ["/device:CPU:1", "more than once"]),
        (["GPU:0"], ["'GPU:0'", "Visible:"]),
        ([0], ["there is no device 0", "GPU ids", "no GPU is visible"]),
        ([True], ["there is no device True"]),
        (["/job:worker/task:1/device:CPU:0"], ["/job:worker", "Visible:"]),
    ],
    ids=str,
)
def test_towers_that_cannot_be_are_refused(towers, expected):
    with pytest.raises(kt.TowerError) as error:
        kt.TowerStrategy(towers)
    for part in expected:
        assert part in str(error.value)


@pytest.fixture
def pretend(monkeypatch):
    """TensorFlow lists GPUs; nothing may be put on them."""

    def pretend(**number):
        def listed(kind):
            return [
                tf.config.LogicalDevice(f"/device:{kind}:{index}", kind)
                for index in range(number[kind])
            ]

        monkeypatch.setattr(tf.config, "list_logical_devices", listed)
        monkeypatch.setattr(devices_lib, "_made", [])

    return pretend


def test_gpus_come_before_cpus(pretend):
    pretend(GPU=2, CPU=TOWERS)
    gpus = ["/device:GPU:0", "/device:GPU:1"]
    for towers, wanted in (
        (None, gpus),
        (2, gpus),
        ([1, 0], gpus[::-1]),
        ([np.int64(1)], gpus[1:]),
        (["cpu:0", 1], ["/device:CPU:0", gpus[1]]),
    ):
        assert devices_lib.devices_of(towers) == wanted
    refused = {"Give 1 to 2": 3, "no device 2": [2], "once": [1, "GPU:1"]}
    for said, towers in refused.items():
        with pytest.raises(kt.TowerError, match=said):
            devices_lib.devices_of(towers)
    made = kt.virtual_towers(3)
    assert devices_lib.devices_of(None) == made
    assert devices_lib.devices_of(2) == made[:2]
    assert resolved(TOWERS) == list(range(TOWERS))
    with pytest.raises(kt.TowerError, match=f"Give 1 to {TOWERS}"):
        devices_lib.devices_of(TOWERS + 1)
    # By name or id a GPU can still be had.
    assert devices_lib.devices_of([1]) == gpus[1:]


def test_one_device_alone_is_warned_of(pretend, caplog):
    pretend(GPU=1, CPU=2)
    with kt.TowerStrategy(["CPU:0", "CPU:1"]):
        assert "no other device" not in caplog.text
    pretend(GPU=0, CPU=1)
    with pytest.raises(kt.TowerError, match=r"Give 1, or call .*virtual_tow"):
        kt.TowerStrategy(2)
    for make in (kt.TowerStrategy, kt.ParameterServerTowerStrategy):
        caplog.clear()
        with make():
            (said,) = caplog.messages
        for part in ("1 tower (", "CPU:0)", "no other device", "virtual_tow"):
            assert part in said


def test_the_last_call_of_virtual_towers_counts(devices):
    for number in (4, np.int64(2)):
        assert kt.virtual_towers(number) == devices[:number]
        assert kt.TowerStrategy().num_towers == number


def test_a_wrong_number_of_virtual_towers_is_refused():
    for towers in (0, True, 2.0, None):
        with pytest.raises(kt.TowerError, match="whole number, 1 or more"):
            kt.virtual_towers(towers)


def test_virtual_towers_after_tensorflow_has_started_are_refused():
    said = rf"virtual_towers\({TOWERS + 1}\) .* too late.*{TOWERS} CPU"
    with pytest.raises(kt.TowerError, match=said) as raised:
        kt.virtual_towers(TOWERS + 1)
    # TensorFlow's error says no more.
    assert raised.value.__suppress_context__


def test_names_of_devices():
    task = "/task:0/device:CPU:1"
    full = f"/job:localhost/replica:0{task}"
    assert devices_lib.same_device("CPU:1", full)
    assert devices_lib.same_device(full, "CPU:1")
    unlike = ("", "CPU:2", "GPU:1", "/task:1/device:CPU:1")
    assert not any(devices_lib.same_device(task, other) for other in unlike)
    assert devices_lib.host_of("/job:worker/task:2/device:GPU:1") == (
        "/job:worker/task:2/device:CPU:0"
    )


@pytest.mark.parametrize("own", [False, True])
def test_share_machine(own, monkeypatch):
    """A launcher may show each rank its own GPUs alone."""
    there, visible = ["first", "second"], []
    monkeypatch.delenv(ENV_OWN_GPUS, raising=False)
    if own:
        monkeypatch.setenv(ENV_OWN_GPUS, "1")
        del there[0]
    stand_in = SimpleNamespace(
        list_physical_devices=lambda kind: there,
        set_visible_devices=lambda mine, kind: visible.extend(mine),
        get_visible_devices=lambda kind: visible,
    )
    monkeypatch.setattr(tf, "config", stand_in)
    rank = SimpleNamespace(rank=1, local_rank=1, local_size=1)
    assert devices_lib.share_machine(rank, 1) == [0]
    assert visible == ["second"]
    if not own:
        with pytest.raises(kt.TowerError, match="its machine has only 2"):
            devices_lib.share_machine(rank, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", [80 * 10**9, None, None]),
        ("24GiB", [24 * 2**30] * 3),
        ("0", [None] * 3),
    ],
)
def test_the_memory_of_devices(given, expected, monkeypatch):
    """That of GPUs, which TensorFlow reports, unless it is given."""
    of_tensorflow = {"/device:GPU:0": 80 * 10**9, "/device:CPU:0": 2**28}
    monkeypatch.setattr(compat, "memory_of_devices", lambda: of_tensorflow)
    monkeypatch.setenv(ENV_DEVICE_MEMORY, given)
    names = ["/job:worker/replica:0/task:1/device:GPU:0", "/device:GPU:1"]
    found = devices_lib.memory_of([*names, "/device:CPU:0"])
    assert found == expected


def test_what_is_no_memory_is_refused(monkeypatch):
    monkeypatch.setenv(ENV_DEVICE_MEMORY, "much")
    with pytest.raises(kt.TowerError, match="KERAS_TOWERS_DEVICE_MEMORY=much"):
        devices_lib.memory_of(["/device:CPU:0"])
    assert compat.memory_of_devices()["/device:CPU:0"] > 0
