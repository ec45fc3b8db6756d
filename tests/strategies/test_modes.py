"""Which reduction runs, what is said of it, and what it falls back to."""

import logging
import re
import threading

import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.options import StrategyOptions
from keras_towers.foundation import settings, system
from keras_towers.reduction.collectives import OnTowers
from keras_towers.strategies import modes
from tests.kit.compare import assert_all_close
from tests.kit.training import fit, linear

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

    monkeypatch.setattr(modes, "nccl_available", available)
    return request.param


def test_the_default_is_the_host_for_cpus_and_nccl_for_gpus(nccl):
    on_gpus = (
        ("nccl", "several GPUs") if nccl else ("towers", "the test says so")
    )
    for devices, name, reason in (
        (CPUS[:1], "host", "one tower"),
        *((CPUS[:number], "host", "are CPUs") for number in range(2, 9)),
        (GPUS[:1], "towers", "one tower"),
        *((GPUS[:number], *on_gpus) for number in range(2, 9)),
        ([CPUS[0], GPUS[0]], "towers", "CPU:0 is not a GPU"),
    ):
        mode = modes.choose(devices, StrategyOptions())
        assert mode.name == name, devices
        assert reason in mode.reason


def test_a_mode_that_cannot_run_is_replaced_with_a_warning(nccl, caplog):
    caplog.set_level(logging.INFO, "keras_towers")
    no_nccl = None if nccl else "the test says so"
    for name, devices, obstacle in (
        *((name, CPUS[:3], None) for name in ("host", "towers", "collective")),
        *((name, GPUS[:3], None) for name in ("host", "towers", "collective")),
        ("nccl", CPUS[:2], "/device:CPU:0 is not a GPU"),
        ("nccl", GPUS[:2], no_nccl),
        ("nccl", GPUS[:3], no_nccl),
        *(("hierarchical", CPUS[:n], f"there are {n}") for n in (1, 3, 7)),
        *(("hierarchical", GPUS[:n], f"there are {n}") for n in (1, 3, 7)),
        *(("hierarchical", kind[:6], None) for kind in (CPUS, GPUS)),
    ):
        caplog.clear()
        mode = modes.choose(devices, StrategyOptions(mode=name))
        if obstacle is None:
            assert (mode.name, caplog.records) == (name, [])
            assert "requested" in mode.reason
            assert ("algorithm" in mode.reason) == (name == "collective")
            wider = name in ("collective", "nccl") and devices[0] in GPUS
            assert ("bfloat16 is summed as float32" in mode.reason) == wider
            continue
        assert mode.name == ("host" if devices[0] in CPUS else "towers")
        assert f"{name!r} was requested, but" in mode.reason
        assert obstacle in mode.reason
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        using, said = record.getMessage().split(": ", 1)
        assert repr(mode.name) in using
        assert said in mode.reason


def test_a_strategy_says_what_runs_and_why():
    strategy = kt.TowerStrategy(3, mode="nccl")
    assert strategy.mode == "host"
    said = "'nccl' was requested, but /device:CPU:0 is not a GPU"
    assert said in strategy.describe()


def test_names_of_tensorpack_are_accepted():
    assert kt.TowerStrategy(3, mode="gpu").mode == "towers"
    assert kt.TowerStrategy(3, mode="cpu").mode == "host"
    strategy = kt.ParameterServerTowerStrategy(3, ps_device="gpu")
    assert strategy.ps_device == "towers"


def fails(parts, devices):
    with tf.control_dependencies([tf.debugging.Assert(False, ["no link"])]):
        return [[tf.identity(grad) for grad in row] for row in parts]


def adds_wrongly(parts, devices):
    sums = OnTowers().all_reduce(parts, devices)
    return [*sums[:-1], [grad + 1 for grad in sums[-1]]]


def hangs(parts, devices):
    never = tf.numpy_function(lambda: END.wait() and 0.0, [], tf.float64)
    with tf.control_dependencies([never]):
        return OnTowers().all_reduce(parts, devices)


END = threading.Event()


@pytest.mark.parametrize(
    ("reduce", "why"),
    [
        (fails, "no link"),
        (hangs, "has not ended after 1 s"),
        (adds_wrongly, r"a first sum is .* instead of \[6.0, 14.0\]"),
        (OnTowers().all_reduce, None),
    ],
)
def test_nccl_is_tried_before_it_is_used(reduce, why, monkeypatch, caplog):
    monkeypatch.setattr(modes, "nccl_available", lambda devices: (True, ""))

    class Tried(OnTowers):
        def all_reduce(self, grads, devices):
            return reduce(grads, devices)

    monkeypatch.setitem(modes.MODES, "nccl", Tried)
    monkeypatch.setattr(system, "limit_teardown", lambda: None)
    monkeypatch.setenv(
        settings.ENV_NCCL_TIMEOUT, "1" if reduce is hangs else ""
    )
    END.clear()
    modes._failure.cache_clear()
    for _ in range(2):
        strategy = kt.TowerStrategy(3, mode="nccl")
        assert strategy.mode == ("towers" if why else "nccl")
    END.set()
    modes._failure.cache_clear()
    if why is None:
        assert not caplog.records
        return
    assert re.search(why, strategy.describe())
    assert all("using mode 'towers'" in r.getMessage() for r in caplog.records)
    mine, alone = linear(), linear()
    with strategy:
        fit(mine)
    fit(alone)
    assert_all_close(mine.get_weights(), alone.get_weights(), 1e-5)
