"""Which device holds a variable."""

import pytest

from keras_towers.fit.weights import placement as p

pytestmark = pytest.mark.core

GPUS = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
CPU = "/device:CPU:0"
ON_CPU = {"small_device": CPU, "small_bytes": 100}
ON_FIRST = {"small_device": GPUS[0], "small_bytes": 100}


@pytest.mark.parametrize(
    "small, sizes, places",
    [
        # The order matters.
        ({}, [4, 4, 8], [GPUS[0], GPUS[1], GPUS[0]]),
        ({}, [8, 4, 4], [GPUS[0], GPUS[1], GPUS[1]]),
        (ON_CPU, [99, 100, 200, 1], [CPU, GPUS[0], GPUS[1], CPU]),
        # One of the devices, where they count.
        (ON_FIRST, [99, 100], [GPUS[0], GPUS[1]]),
        ({**ON_CPU, "small_bytes": 0}, [1], [GPUS[0]]),
    ],
)
def test_a_variable_goes_where_the_fewest_bytes_are(small, sizes, places):
    # Any iterable of devices.
    place = p.LeastLoadedPlacement(iter(GPUS[:2]), **small)
    loads = dict.fromkeys([*GPUS[:2], *places], 0)
    for size, device in zip(sizes, places, strict=True):
        assert place(f"of {size} bytes", (size,), "int8") == device
        loads[device] += size
    assert place.devices == tuple(GPUS[:2])
    # The device of small ones is listed without any.
    assert {**dict.fromkeys(place.loads, 0), **loads} == place.loads


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


def test_sizes_in_bytes():
    sizes = [p.byte_size((2, 3), "bfloat16"), p.byte_size((2,), "string")]
    assert sizes == [12, None]


def test_nothing_is_placed_after_clear():
    place = p.LeastLoadedPlacement(GPUS[:2], **ON_CPU)
    place("kernel", (200,), "int8")
    place.clear()
    assert place.placed == []
    assert place.loads == {GPUS[0]: 0, GPUS[1]: 0, CPU: 0}
    assert place("kernel", (200,), "int8") == GPUS[0]
