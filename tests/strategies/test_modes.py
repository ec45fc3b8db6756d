"""Which reduction runs, what is said of it, and what it falls back to."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import reduction
from keras_towers.strategies import modes

pytestmark = pytest.mark.core

CPUS = [f"/device:CPU:{index}" for index in range(8)]
GPUS = [f"/device:GPU:{index}" for index in range(8)]


@pytest.fixture(params=[True, False])
def nccl(request, monkeypatch):
    """NCCL runs on GPUs, or it does not."""

    def available(devices):
        if all("GPU" in device for device in devices) and len(devices) > 1:
            return request.param, "the test says so"
        return False, f"{devices[0]} is not a GPU"

    monkeypatch.setattr(reduction, "nccl_available", available)
    return request.param


@pytest.mark.parametrize("number", range(1, 9))
def test_default_on_cpus(number, nccl):
    assert modes.choose(CPUS[:number], None).name == "cpu"


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 7])
def test_default_on_gpus(number, nccl):
    mode = modes.choose(GPUS[:number], None)
    assert mode.name == ("nccl" if nccl else "gpu")
    if not nccl:
        assert "the test says so" in mode.reason


def test_default_on_eight_gpus(nccl):
    mode = modes.choose(GPUS, None)
    assert mode.name == "hierarchical"
    assert "eight" in mode.reason


def test_default_on_one_tower(nccl):
    assert modes.choose(CPUS[:1], None).name == "cpu"
    assert modes.choose(GPUS[:1], None).name == "gpu"


def test_default_on_a_mixture(nccl):
    assert modes.choose([CPUS[0], GPUS[0]], None).name == "gpu"


@pytest.mark.parametrize("name", modes.MODES)
def test_what_is_asked_for_is_logged_unless_it_runs(name, nccl, caplog):
    for devices in (CPUS[:2], CPUS[:3], GPUS[:2], GPUS[:3]):
        caplog.clear()
        with caplog.at_level(logging.INFO, "keras_towers"):
            mode = modes.choose(devices, name)
        if mode.name == name:
            assert "requested" in mode.reason
            assert not caplog.records
        else:
            [record] = caplog.records
            assert record.levelno == logging.WARNING
            assert repr(mode.name) in record.getMessage()
            assert repr(name) in record.getMessage()
            assert record.getMessage().split(": ", 1)[1] in mode.reason


def test_nccl_needs_gpus(nccl, caplog):
    mode = modes.choose(CPUS[:2], "nccl")
    assert mode.name == "cpu"
    assert "'nccl' was requested" in mode.reason
    assert "/device:CPU:0 is not a GPU" in mode.reason
    assert modes.choose(GPUS[:2], "nccl").name == ("nccl" if nccl else "gpu")


@pytest.mark.parametrize("devices,name", [(CPUS, "cpu"), (GPUS, "gpu")])
@pytest.mark.parametrize("number", [1, 3, 7])
def test_hierarchical_needs_an_even_number(devices, name, number, nccl):
    mode = modes.choose(devices[:number], "hierarchical")
    assert mode.name == name
    assert f"there are {number}" in mode.reason
    assert modes.choose(devices[:6], "hierarchical").name == "hierarchical"


def test_collective_says_its_algorithm(monkeypatch):
    made = {}

    class Collective:
        def __init__(self, devices, *hint):
            self.hint = "ring"
            made["devices"] = list(devices)

        def __call__(self, grads, devices):
            raise AssertionError("not run here")

    monkeypatch.setattr(reduction, "CollectiveAllReduce", Collective)
    mode = modes.choose(CPUS[:2], "collective")
    assert mode.name == "collective"
    assert made["devices"] == CPUS[:2]
    assert "ring" in mode.reason


@pytest.mark.parametrize("wanted", ["NCCL", "ring", "", 3, True, ["cpu"]])
def test_unknown_mode(wanted):
    with pytest.raises(kt.TowerError) as error:
        kt.TowerStrategy(2, mode=wanted)
    assert repr(wanted) in str(error.value)
    for name in (*map(repr, modes.MODES), "None"):
        assert name in str(error.value)


@pytest.mark.parametrize("name", modes.MODES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_mode_sums(name, number):
    devices = CPUS[:number]
    reduce = modes.choose(devices, name).reduce
    rows = [
        [tf.fill([2, 3], float(k + 1)), tf.fill([4], 10.0 * k)]
        for k in range(number)
    ]
    totals = [sum(range(1, number + 1)), 10 * sum(range(number))]
    # As in a train function.
    for row in tf.function(lambda: reduce(rows, devices))():
        np.testing.assert_array_equal(row[0], np.full([2, 3], totals[0]))
        np.testing.assert_array_equal(row[1], np.full([4], totals[1]))


def test_strategy_says_what_runs_and_why(caplog):
    with caplog.at_level(logging.WARNING, "keras_towers"):
        strategy = kt.TowerStrategy(3, mode="nccl")
    assert strategy.mode == "cpu"
    described = strategy.describe()
    assert 'mode "cpu"' in described
    assert "'nccl' was requested, but" in described
    assert "CPU:0 is not a GPU" in described
    assert "CPU:0 is not a GPU" in caplog.text


def test_strategy_on_an_odd_number():
    strategy = kt.TowerStrategy(3, mode="hierarchical")
    assert strategy.mode == "cpu"
    assert "even number of towers" in strategy.describe()
    assert kt.TowerStrategy(4, mode="hierarchical").mode == "hierarchical"


@pytest.mark.parametrize("name", ["cpu", "gpu", "collective", "hierarchical"])
def test_strategy_runs_what_was_asked_for(name, caplog):
    with caplog.at_level(logging.WARNING, "keras_towers"):
        strategy = kt.TowerStrategy(2, mode=name)
    assert strategy.mode == name
    assert f'mode "{name}": requested' in strategy.describe()
    assert not caplog.records
