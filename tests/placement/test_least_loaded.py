"""Which device holds a variable."""

import random

import numpy as np
import pytest

import keras_towers as kt
from keras_towers import placement as p

pytestmark = pytest.mark.core

GPUS = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
CPU = "/device:CPU:0"


def some_variables(seed: int, number: int = 60) -> list[tuple]:
    draw = random.Random(seed)
    return [
        (
            f"v{index}",
            tuple(
                draw.choice((1, 3, 17, 256)) for _ in range(draw.randint(0, 3))
            ),
            draw.choice(("float32", "float16", "int64", "bool", "complex64")),
        )
        for index in range(number)
    ]


@pytest.mark.parametrize("number_of_devices", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(10))
def test_loads_differ_by_at_most_the_largest_variable(seed, number_of_devices):
    devices = [f"/device:GPU:{index}" for index in range(number_of_devices)]
    place = p.LeastLoadedPlacement(devices)
    largest = total = 0
    for variable in some_variables(seed):
        assert place(*variable) in devices
        size = p.byte_size(*variable[1:])
        largest, total = max(largest, size), total + size
        loads = place.loads.values()
        assert max(loads) - min(loads) <= largest
        assert sum(loads) == total


def test_deterministic():
    first, second = p.LeastLoadedPlacement(GPUS), p.LeastLoadedPlacement(GPUS)
    for variable in some_variables(3):
        assert first(*variable) == second(*variable)
    assert first.placed == second.placed


def test_the_order_matters():
    sizes = {"a": 4, "b": 4, "c": 8}

    def loads(order):
        place = p.LeastLoadedPlacement(GPUS[:2])
        for name in order:
            place(name, (sizes[name],), "int8")
        return sorted(place.loads.values())

    assert loads("cab") == [8, 8]
    assert loads("abc") == [4, 12]


def test_bytes_not_numbers():
    place = p.LeastLoadedPlacement(GPUS[:2])
    assert place("a", (3,), "float64") == GPUS[0]
    assert place("b", (4,), "int8") == GPUS[1]
    assert place("c", (4,), "int8") == GPUS[1]
    assert place.loads == {GPUS[0]: 24, GPUS[1]: 8}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(None, "float32"), ((None, 3), "float32"), ((3,), "string")],
)
def test_unknown_sizes_count_nothing_and_are_told_once_each(
    shape, dtype, caplog
):
    place = p.LeastLoadedPlacement(GPUS[:2])
    with caplog.at_level("WARNING", "keras_towers"):
        devices = [place(name, shape, dtype) for name in ("odd", "other")]
    # Nobody knows which is larger: at least they are not all on one device.
    assert devices == GPUS[:2]
    assert set(place.loads.values()) == {0}
    assert len(caplog.records) == 2
    assert "'odd'" in caplog.records[0].getMessage()
    assert "0 bytes" in caplog.records[0].getMessage()


def test_small_ones_on_one_device():
    place = p.LeastLoadedPlacement(GPUS[:2], CPU, small_bytes=100)
    assert place("bias", (24,), "float32") == CPU
    assert place("kernel", (25,), "float32") == GPUS[0]
    assert place("other", (50,), "float32") == GPUS[1]
    assert place("scalar", (), "float32") == CPU
    assert place.loads == {GPUS[0]: 100, GPUS[1]: 200, CPU: 100}


def test_small_ones_on_one_of_the_devices_count_there():
    place = p.LeastLoadedPlacement(GPUS[:2], GPUS[0], small_bytes=100)
    place("bias", (24,), "float32")
    assert place("kernel", (25,), "float32") == GPUS[1]
    assert list(place.loads) == GPUS[:2]


def test_device_of():
    place = p.LeastLoadedPlacement(GPUS[:2])
    for _ in range(3):
        place("kernel", (2,), "float32")
    assert place.device_of("kernel") == GPUS[0]
    assert place.device_of("kernel_1") == GPUS[1]
    assert place.device_of("kernel_2") == GPUS[0]
    with pytest.raises(kt.TowerError, match="'bias' .* kernel, kernel_1"):
        place.device_of("bias")


def test_device_of_nothing():
    with pytest.raises(kt.TowerError, match="none"):
        p.LeastLoadedPlacement(GPUS).device_of("kernel")


def test_clear():
    place, again = p.LeastLoadedPlacement(GPUS, CPU), []
    for _ in range(2):
        again.append([place(*variable) for variable in some_variables(1)])
        described = place.describe()
        place.clear()
        assert not place.placed and not any(place.loads.values())
    assert again[0] == again[1]
    assert place.describe() != described
    assert place("v0", (2,), "int8") == place.device_of("v0")


def test_describe():
    place = p.LeastLoadedPlacement(GPUS[:2])
    place("dense/kernel", (784, 512), "float32")
    place("dense/bias", (512,), "float32")
    assert place.describe().splitlines() == [
        "device         variables      bytes",
        "/device:GPU:0          1  1,605,632",
        "/device:GPU:1          1      2,048",
    ]


@pytest.mark.parametrize("devices", [[], (), iter(()), None, "", CPU, 0, 3])
def test_no_devices(devices):
    with pytest.raises(kt.TowerError, match="names no devices"):
        p.LeastLoadedPlacement(devices)


@pytest.mark.parametrize(
    "name", ["nowhere", "", 0, None, "/cpu:x", "CPU", "CPU:1", "device:CPU:1"]
)
def test_names_that_are_no_devices(name):
    with pytest.raises(kt.TowerError, match="is not a device name"):
        p.LeastLoadedPlacement([CPU, name])
    if name is not None:
        with pytest.raises(kt.TowerError, match="is not a device name"):
            p.LeastLoadedPlacement([CPU], small_device=name)


def test_doubled_devices():
    with pytest.raises(kt.TowerError, match="GPU:1 more than once"):
        p.LeastLoadedPlacement([*GPUS, GPUS[1]])


@pytest.mark.parametrize(
    "other",
    ["/cpu:0", "/device:cpu:0", "/job:localhost/device:CPU:0", "/CPU"],
)
def test_two_names_of_one_device(other):
    with pytest.raises(kt.TowerError) as error:
        p.LeastLoadedPlacement([CPU, GPUS[0], other])
    assert f"has {CPU}, {other} more than once" in str(error.value)
    place = p.LeastLoadedPlacement([CPU, GPUS[0]], other)
    assert place("bias", (1,), "float32") == CPU
    assert list(place.loads) == [CPU, GPUS[0]]


def test_any_iterable_of_devices():
    place = p.LeastLoadedPlacement(name for name in GPUS)
    assert place.devices == tuple(GPUS)
    assert [place(name, (1,), "bool") for name in "abc"] == GPUS


@pytest.mark.parametrize("small_bytes", [-1, 1.5, "1k", None, True])
def test_small_bytes_that_are_none(small_bytes):
    with pytest.raises(kt.TowerError, match="small_bytes=.* 0 or more"):
        p.LeastLoadedPlacement(GPUS, CPU, small_bytes)


def test_any_whole_number_of_small_bytes():
    place = p.LeastLoadedPlacement(GPUS, CPU, np.int64(100))
    assert place("bias", (24,), "float32") == CPU
    assert p.LeastLoadedPlacement(GPUS, CPU, 0)("v", (), "bool") == GPUS[0]


@pytest.mark.parametrize(
    "name", ["/job:ps/task:1", "/cpu:0", "/job:worker/task:0/device:GPU:3"]
)
def test_devices_that_are_not_here(name):
    assert p.LeastLoadedPlacement([name])("v", (), "bool") == name


def test_byte_size():
    assert p.byte_size((), "float32") == 4
    assert p.byte_size((2, 3), "bfloat16") == 12
    assert p.byte_size((0, 3), "float32") == 0
    assert p.byte_size((2,), "string") is None
